"""Predicted against measured step times of real training on this machine, after ``calibrate --here`` and nothing else.

Run: python -m bench.here [--rounds 5] [--json] [PLAN ...]

Every plan trains a small Llama-like model with 2 to 8 processes; beyond one process a core they share cores, which the
cluster ``Nxhere`` says. Rounds go through all plans, so that what else the machine does meets all of them; a plan's
figure is the median over the rounds of the median step after a warm-up, its spread the range of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median

import msgspec
import torch

from meshwright.calibrate import here
from meshwright.catalog import measured_here
from meshwright.cost import load_framework, standard
from meshwright.plan import Plan, parse
from meshwright.predict import predict
from meshwright.run import bench
from meshwright.run.data import Batch
from meshwright.run.launch import World, start
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=4, hidden=256, heads=8, kv_heads=4, vocab=2048, ffn=704, gated=True, name="small")
TRAIN = Train(global_batch=16, seq_len=128, dtype="fp32")
PLANS = (
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


def steps(world: World, plan: Plan) -> list[float]:
    """Seconds of some steps after a warm-up, on the slowest rank."""
    trainer = Trainer(MODEL, plan, TRAIN, build(plan), settings=Settings())
    count = TRAIN.global_batch // plan.layout.dp
    out = []
    for step in range(WARMUP + STEPS):
        generator = torch.Generator().manual_seed(step * 100 + trainer.mesh["dp"].index)
        batch = Batch(torch.randint(0, MODEL.vocab, (count, TRAIN.seq_len + 1), generator=generator), None)
        begun = time.perf_counter()
        trainer.step(batch)
        out.append(time.perf_counter() - begun)
    trainer.settle()
    return out[WARMUP:]


class Row(msgspec.Struct):
    """One plan: predicted seconds and the rounds' measured ones."""

    plan: str
    predicted_s: float
    rounds_s: list[float]

    @property
    def measured_s(self) -> float:
        return median(self.rounds_s)

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
        found = predict(MODEL, cluster, TRAIN, plan, costs=costs, detail=False)
        rows.append(Row(name, found.step_time_s, []))
        plans.append(plan)
    for number in range(rounds):
        for row, plan in zip(rows, plans, strict=True):
            print(f"round {number + 1} of {rounds}: {row.plan}", file=sys.stderr)
            row.rounds_s.append(median(start(steps, plan, num_ranks=plan.layout.num_ranks, device="cpu")))
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
    if asked.json:
        print(json.dumps({"rows": msgspec.to_builtins(rows), "median": median(plain), "worst": max(plain)}, indent=1))
        return
    print(f"{'plan':28s} {'predicted':>10s} {'measured':>10s} {'spread of the rounds':>24s}   error")
    for row in rows:
        spread = f"{min(row.rounds_s) * 1e3:.0f} to {max(row.rounds_s) * 1e3:.0f} ms"
        inside = " within the spread" if row.error == 0 else ""
        print(
            f"{row.plan:28s} {row.predicted_s * 1e3:7.0f} ms {row.measured_s * 1e3:7.0f} ms {spread:>24s} "
            f"{row.predicted_s / row.measured_s - 1:+7.1%}{inside}"
        )
    print(f"{len(rows)} plans: median {median(plain):.1%} (target 10%), worst {max(plain):.1%} (target 25%)")


if __name__ == "__main__":
    main()
