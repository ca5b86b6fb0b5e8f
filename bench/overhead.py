"""What recording a run costs, and what saving beside training saves, in one run of interleaved turns.

Run: python -m bench.overhead [--repeats 12] [--json] [PLAN ...]

A turn is some steps of a small model on two gloo processes of one torch thread: as they are; recorded; with a
checkpoint written before the first of them; and with one copied and written beside them (what `meshwright run` does).
The clock stops when the checkpoint is on the disk. In four rounds each kind comes at each place once and once after
each other one (:mod:`bench.turns`), so repeats are best a multiple of four; a ratio is the median over the rounds with
the interval of its order statistics, of the time that passes and of the processors' time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch
from tests.run.processes import launch

from bench.executor import RECORDED, TRAIN, small_llama
from bench.turns import Ratio, ratio, sequences, take_turns, together
from meshwright.plan import parse
from meshwright.run import record
from meshwright.run.checkpoint import AsyncSaver, Meta, identity
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer

PLANS = ("dp2 zero1 mb2", "pp2 1f1b mb2")
STEPS, WARMUP = 3, 1
KINDS = ("plain", "recorded", "saved first", "saved beside")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a turn of each kind, by round, on the slower rank, and of processor on both; ratios to the plain turn,
    and of saving beside to saving first."""

    plan: str
    seconds: dict[str, list[float]]
    processor_seconds: dict[str, list[float]]
    ratios: dict[str, Ratio]


def measure(plan: str, repeats: int) -> Row:
    """One plan, every kind of turn."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        found = launch(2, _take_turns, plan, repeats, folder, timeout_s=3600.0)
    elapsed, processor = together(found)
    ratios = {}
    for above, below in (
        ("recorded", "plain"),
        ("saved first", "plain"),
        ("saved beside", "plain"),
        ("saved beside", "saved first"),
    ):
        ratios[f"{above} / {below}"] = ratio(elapsed[above], elapsed[below])
        ratios[f"{above} / {below}, processor"] = ratio(processor[above], processor[below])
    return Row(plan=plan, seconds=elapsed, processor_seconds=processor, ratios=ratios)


def _take_turns(rank: int, plan_text: str, repeats: int, folder: str) -> dict[str, tuple[list, list]]:
    """Elapsed and processor seconds of every counted turn of one process, by kind."""
    model, plan = small_llama(), parse(plan_text).on(2)
    mesh = build(plan)
    trainer = Trainer(model, plan, TRAIN, mesh, settings=Settings())
    recorder = record.Recorder(rank=rank, keep=STEPS)
    saver, first = (AsyncSaver(Path(folder) / name, mesh["world"], keep=1) for name in ("beside", "first"))

    def meta() -> Meta:
        step, known = trainer.step_count, identity(model)
        return Meta(step=step, seed=0, model=model.name, model_hash=known, plan=plan.text(), world=mesh.world)

    def turn(kind: str, mine: torch.Tensor) -> None:
        if kind == "saved first":
            first.begin(trainer.pieces(), meta())
            first.wait()
        if kind == "saved beside":
            saver.begin(trainer.pieces(), meta())
            trainer.before_update.append(saver.before_update)
        if kind == "recorded":
            record.install(recorder)
        for _ in range(STEPS):
            trainer.step(Batch(mine, None))
            if kind == "saved beside":
                saver.poll()
        trainer.settle()
        record.install(record.Off())
        if kind == "saved beside":
            saver.wait()
            trainer.before_update.clear()

    out = take_turns(
        {kind: partial(turn, kind) for kind in KINDS},
        lambda number: sequences(TRAIN, model.vocab, mesh, number),
        repeats=repeats,
        warmup=WARMUP,
    )
    saver.close()
    first.close()
    return out


def lines(row: Row) -> list[str]:
    """A row in words."""
    recorded = row.ratios["recorded / plain"]
    verdict = "met" if recorded.high <= RECORDED else "not shown" if recorded.low <= RECORDED else "missed"
    out = [f"{row.plan}: a turn of {STEPS} steps takes {median(row.seconds['plain']) * 1e3:.0f} ms"]
    for name in (n for n in row.ratios if not n.endswith("processor")):
        more = f"  (recording at most {RECORDED - 1:.0%}: {verdict})" if name == "recorded / plain" else ""
        out.append(f"  {name:28s} {row.ratios[name]!s:26s} of processor {row.ratios[name + ', processor']}{more}")
    return out


def main() -> None:
    """Measure the chosen plans and print them."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("plan", nargs="*", help=f"plans of two ranks (default: {', '.join(PLANS)})")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    asked = parser.parse_args()
    found = []
    for plan in asked.plan or PLANS:
        print(f"measuring {plan}", file=sys.stderr)
        found.append(measure(plan, asked.repeats))
        print("\n".join(lines(found[-1])), file=sys.stderr if asked.json else sys.stdout, flush=True)
    if asked.json:
        print(json.dumps(msgspec.to_builtins(found), indent=1))


if __name__ == "__main__":
    main()
