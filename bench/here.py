"""Predicted against measured step times of real training on this machine, after ``calibrate --here`` and nothing else.

Run: python -m bench.here [--rounds 5] [--json] [PLAN ...]

Every plan trains a small Llama-like model with 2 to 8 processes; beyond one process a core they share cores, which the
cluster ``Nxhere`` says. Rounds go through all plans, so that what else the machine does meets all of them; a plan's
figure is the median over the rounds of the median step after a warm-up, its spread the range of the rounds. The last
columns are the processors' time of a step on all ranks, predicted and measured: on a machine that does other work too,
they are what can be believed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median

import msgspec
import torch
import torch.distributed as dist

from meshwright.calibrate import here
from meshwright.catalog import measured_here
from meshwright.cost import load_framework, standard
from meshwright.plan import Plan, parse
from meshwright.run import bench
from meshwright.run.data import Batch
from meshwright.run.environment import prefer
from meshwright.run.launch import start
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.simulate.cores import processor_seconds
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=4, hidden=256, heads=8, kv_heads=4, vocab=2048, ffn=704, gated=True, name="small")
TRAIN = Train(global_batch=16, seq_len=128, dtype="fp32")
PLANS = (
    "dp1 mb4",
    "dp2 mb2",
    "dp2 mb2 overlap=none",
    "dp2 zero1 mb2",
    "dp2 zero2 mb4",
    "dp2 zero3 mb4",
    "tp2 mb4",
    "tp2 nosp mb4",
    "cp2 mb4",
    "cp2 ulysses mb4",
    "pp2 mb2",
    "pp2 gpipe mb2",
    "pp2 vpp2 interleaved mb2",
    "pp2 zb-h1 mb2",
    "dp2 zero1 mb2 full",
    "dp4 mb2",
    "tp2 dp2 mb4",
    "pp2 dp2 zero1 mb2",
    "pp4 mb2",
    "dp8 mb2",
    "pp2 tp2 dp2 mb2",
)
WARMUP, STEPS = 2, 5


def steps(world: World, plan: Plan) -> tuple[float, float]:
    """Seconds of the median step after a warm-up on the first rank, and seconds of processor time of the median step on
    all ranks together."""
    prefer()
    trainer = Trainer(MODEL, plan, TRAIN, build(plan), settings=Settings())
    count = TRAIN.global_batch // plan.layout.dp
    out, busy = [], []
    for step in range(WARMUP + STEPS):
        generator = torch.Generator().manual_seed(step * 100 + trainer.mesh["dp"].index)
        batch = Batch(torch.randint(0, MODEL.vocab, (count, TRAIN.seq_len + 1), generator=generator), None)
        if world.size > 1:
            dist.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        trainer.step(batch)
        out.append(time.perf_counter() - begun)
        busy.append(time.process_time() - worked)
    trainer.settle()
    total = torch.tensor(median(busy[WARMUP:]), dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(total)
    return median(out[WARMUP:]), float(total)


class Row(msgspec.Struct):
    """One plan: predicted seconds and the rounds' measured ones, that pass and of the processors."""

    plan: str
    predicted_s: float
    rounds_s: list[float]
    predicted_processor_s: float
    rounds_processor_s: list[float]

    @property
    def measured_s(self) -> float:
        return median(self.rounds_s)

    @property
    def processor_error(self) -> float:
        return self.predicted_processor_s / median(self.rounds_processor_s) - 1

    @property
    def error(self) -> float:
        """0 when the prediction is within the spread of the rounds."""
        low, high = min(self.rounds_s), max(self.rounds_s)
        return 0.0 if low <= self.predicted_s <= high else self.predicted_s / self.measured_s - 1


def measure(names: list[str], rounds: int) -> list[Row]:
    """Every plan, predicted and measured."""
    rows, plans = [], []
    for name in names:
        read = parse(name)
        plan = read.on(read.layout.tp * read.layout.pp * read.layout.cp * max(1, read.layout.dp))
        cluster = load(f"{plan.layout.num_ranks}x{here.NAME}")
        costs = standard(load_framework(here.FRAMEWORK))
        found = simulate(plan, MODEL, cluster, TRAIN, costs)
        rows.append(Row(name, found.step_time_s, [], processor_seconds(found.lowered, found.priced), []))
        plans.append(plan)
    for number in range(rounds):
        for row, plan in zip(rows, plans, strict=True):
            print(f"round {number + 1} of {rounds}: {row.plan}", file=sys.stderr)
            elapsed, busy = start(steps, plan, num_ranks=plan.layout.num_ranks, device="cpu")
            row.rounds_s.append(elapsed)
            row.rounds_processor_s.append(busy)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.here", description=__doc__.splitlines()[0])
    parser.add_argument("plan", nargs="*", help="only plans that contain one of these (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    asked = parser.parse_args()
    if not (measured_here() / "here.json").is_file():
        print("measuring this machine first: meshwright calibrate --here", file=sys.stderr)
        here.write(bench.measure(say=lambda line: print(line, file=sys.stderr)), measured_here())
    names = [p for p in PLANS if not asked.plan or any(word in p for word in asked.plan)]
    rows = measure(names, asked.rounds)
    plain = [abs(r.predicted_s / r.measured_s - 1) for r in rows]
    busy = [abs(r.processor_error) for r in rows]
    if asked.json:
        found = {"median": median(plain), "worst": max(plain)}
        found |= {"processor_median": median(busy), "processor_worst": max(busy)}
        print(json.dumps({"rows": msgspec.to_builtins(rows)} | found, indent=1))
        return
    print(
        f"{'plan':28s} {'predicted':>10s} {'measured':>10s} {'spread of the rounds':>24s} {'error':>7s} "
        f"{'of processors':>22s} {'error':>7s}"
    )
    for row in rows:
        spread = f"{min(row.rounds_s) * 1e3:.0f} to {max(row.rounds_s) * 1e3:.0f} ms"
        inside = " within the spread" if row.error == 0 else ""
        processors = f"{row.predicted_processor_s * 1e3:.0f} / {median(row.rounds_processor_s) * 1e3:.0f} ms"
        print(
            f"{row.plan:28s} {row.predicted_s * 1e3:7.0f} ms {row.measured_s * 1e3:7.0f} ms {spread:>24s} "
            f"{row.predicted_s / row.measured_s - 1:+7.1%} {processors:>22s} {row.processor_error:+7.1%}{inside}"
        )
    print(
        f"{len(rows)} plans: median {median(plain):.1%} (target 10%), worst {max(plain):.1%} (target 25%); "
        f"processor time {median(busy):.1%}, {max(busy):.1%}"
    )


if __name__ == "__main__":
    main()
