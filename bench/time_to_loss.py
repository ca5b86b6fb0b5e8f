"""Wall-clock time to the loss of DDP over slow links, of real training: which way to exchange is there first?

Run: python -m bench.time_to_loss [--link 100mbit] [--steps 150] [--write] [--show] [RECIPE ...]

Four processes on emulated hosts train a small model on the sample text for real (``meshwright run --link``); nothing is
slept. The usual exchange of every gradient in every step trains for some steps; the loss that it ends with, a mean over
its last steps of the losses of all replicas, is what every other recipe is trained for until it has it. Steps, seconds
and bytes until then are printed. One learning rate for all, and what a recipe says besides (``@``) is its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from statistics import fmean

import msgspec
import torch
import torch.distributed as dist

from bench.links import machine
from meshwright.plan import Plan, parse
from meshwright.run import data
from meshwright.run.data import tokenizer
from meshwright.run.emulate.hosts import Hosts, missing
from meshwright.run.emulate.wire import read
from meshwright.run.environment import prefer
from meshwright.run.launch import start
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.traffic import sent_bytes
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.spec.workload import parse as workload

FIGURES = Path(__file__).parent / "figures" / "time_to_loss.json"
RANKS, SEED = 4, 0
MODEL = transformer(layers=4, hidden=256, heads=8, kv_heads=4, vocab=512, ffn=704, gated=True, name="small")
TRAIN = "batch=4,seq=64,dtype=fp32"
#: One rate for all; a recipe may take this many times as many steps as the usual one before it is given up.
RATE, PATIENCE = 1e-3, 2.0
#: Steps that a loss is the mean of.
SMOOTHED = 20
RECIPES = (
    "local:h=8",
    "local:h=32",
    "diloco:h=16",
    "diloco:h=32",
    "diloco:h=16,codec=int4",
    "streaming-diloco:h=16,codec=int4",
    "powersgd:rank=2",
    "powersgd:rank=4",
    "topk:share=0.01",
    "int8",
)
"""Policies tried besides the usual exchange: each at one setting of its paper or of this project's book."""


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe's way to a loss: ``steps`` until it was there, or that were done in vain (``reached`` False), the wall
    clock's seconds and bytes that a rank sent until then, and the loss of its last steps."""

    recipe: str
    steps: int
    seconds: float
    sent_bytes: float
    loss: float
    reached: bool = True


class TimeToLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Rows as they were measured once: when, on what kind of machine, over which link; the first is the usual."""

    measured_on: str
    machine: str
    link: str
    model: str
    train: str
    target: float
    rows: tuple[Trained, ...]

    @property
    def sooner(self) -> float:
        """How many times sooner the best recipe has the loss."""
        return self.rows[0].seconds / min(row.seconds for row in self.rows if row.reached)


class Until(msgspec.Struct, frozen=True, kw_only=True):
    """Training to ``steps``, or until the smoothed loss is ``target``."""

    plan: Plan
    train: Train
    corpus: str
    steps: int
    target: float


def trained(world: World, until: Until) -> tuple[int, float, float, float]:
    """Train on the rank `world`; (steps, seconds, bytes sent, smoothed loss). Whether the loss is there is looked at
    after every round, by numbers whose exchange is no part of the seconds."""
    mesh = build(until.plan)
    settings = Settings(lr=RATE, warmup=20, seed=SEED)
    trainer = Trainer(MODEL, until.plan, until.train, mesh, settings=settings)
    corpus = data.load(Path(until.corpus), until.train, vocab=MODEL.vocab, seed=SEED, microbatch=1, place="sample")
    # connections open their windows before the clock starts, as in a run that is longer than this one
    warm = torch.zeros(2**18)
    for _ in range(3):
        dist.all_reduce(warm, group=mesh["data"].handle)
    losses: list[float] = []
    every, seconds, sent = trainer.rounds.policy.when, 0.0, 0.0
    while trainer.step_count < until.steps:
        dist.barrier()
        begun, before = time.monotonic(), sent_bytes() or 0
        for _ in range(max(every, 4)):
            step = trainer.step(corpus.batch(trainer.step_count, mesh["dp"].index, RANKS))
            losses.append(step.loss)
        trainer.settle()
        took = torch.tensor([time.monotonic() - begun, float(losses[-1])], dtype=torch.float64)
        sent += (sent_bytes() or 0) - before
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        seconds += float(took[0])
        mean = torch.tensor(fmean(losses[-SMOOTHED:]), dtype=torch.float64)
        dist.all_reduce(mean)
        if len(losses) >= SMOOTHED and float(mean) / RANKS <= until.target:
            break
    return trainer.step_count, seconds, sent, float(mean) / RANKS


def measure(link: str, steps: int, recipes: Iterable[str]) -> Iterator[Trained]:
    """The usual exchange for so many steps, and every recipe until it has its loss."""
    wire, train = read(link), workload(TRAIN)
    corpus = str(data.build("sample", tokenizer.load("bytes"), data.cache_folder()))
    target = 0.0
    with Hosts(RANKS, wire.rate_bits_s, delay_s=wire.delay_s, patient=True) as hosts:
        for recipe in ("step", *recipes):
            plan = parse(f"dp{RANKS}" + ("" if recipe == "step" else f" sync={recipe}")).on(RANKS)
            most = steps if recipe == "step" else int(PATIENCE * steps)
            until = Until(plan=plan, train=train, corpus=corpus, steps=most, target=target)
            count, seconds, sent, loss = start(trained, until, num_ranks=RANKS, device="cpu", enter=_enter(hosts))
            target = target or loss
            yield Trained(
                recipe=recipe, steps=count, seconds=seconds, sent_bytes=sent, loss=loss, reached=loss <= target
            )  # fmt: skip


def _enter(hosts: Hosts) -> Callable[[int], None]:
    """The command that moves a rank onto its host, before other work of the machine as far as that is allowed."""

    def enter(rank: int) -> None:
        prefer()
        hosts.enter(rank)

    return enter


def line(row: Trained, usual: Trained) -> str:
    there = f"{usual.seconds / row.seconds:6.1f} times sooner" if row.reached else "not there"
    return (
        f"{row.recipe:20s} {row.steps:6d} steps {row.seconds:8.1f} s {row.seconds / row.steps * 1e3:8.1f} ms a step "
        f"{row.sent_bytes / row.steps / 1e6:8.3f} MB a step  loss {row.loss:.4f}  {there}"
    )


def main() -> None:
    """Train the chosen recipes and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.time_to_loss", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="*", help="recipes as sync= says them (default: all of the table)")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--write", action="store_true", help="keep the figures")
    parser.add_argument("--show", action="store_true", help="print the figures that were kept, and train nothing")
    asked = parser.parse_args()
    if asked.show:
        kept = msgspec.json.decode(FIGURES.read_bytes(), type=TimeToLoss)
        print(f"{kept.measured_on}, {kept.machine}, {kept.link}: loss {kept.target:.4f}")
        print("\n".join(line(row, kept.rows[0]) for row in kept.rows))
        print(f"the best recipe has it {kept.sooner:.1f} times sooner (target 10)")
        return
    reason = missing()
    if reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return
    rows: list[Trained] = []
    for row in measure(asked.link, asked.steps, asked.recipe or RECIPES):
        rows.append(row)
        print(line(row, rows[0]), flush=True)
    found = TimeToLoss(
        measured_on=str(date.today()), machine=machine(), link=asked.link, model=f"{MODEL.num_params:,} parameters",
        train=TRAIN, target=rows[0].loss, rows=tuple(rows),
    )  # fmt: skip
    print(f"the best recipe has it {found.sooner:.1f} times sooner (target 10)")
    if asked.write:
        FIGURES.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
