"""Our training step beside the same plan written by hand on torch's own parts, and with the recorder on.

Run: python -m bench.executor [--repeats 12] [--json] [ROW ...]

Each row is one plan on two gloo processes of one torch thread. The three kinds of step (ours, by hand, ours recorded)
take turns in one run, in an order that changes from round to round, and their losses are checked to be those of one
training. A ratio is the median of the rounds' ratios, with the interval that its order statistics give; beside that of
the elapsed time is that of the processors' time, on which other work on the machine has less influence.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import permutations
from math import comb
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from tests.run.processes import launch

from bench import by_hand
from meshwright.plan import parse
from meshwright.run import record
from meshwright.run.data import Batch
from meshwright.run.mesh import build
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

#: Row -> plan, and the same by hand.
ROWS = {
    "ddp": ("dp2 mb2", by_hand.ddp),
    "fsdp": ("dp2 zero3 mb2", by_hand.fsdp),
    "1f1b": ("pp2 1f1b mb2", by_hand.one_f_one_b),
    "interleaved": ("pp2 vpp2 interleaved mb2", by_hand.interleaved),
}
TRAIN = Train(global_batch=16, seq_len=128, dtype="fp32")
MICROBATCH, WARMUP = 2, 2
#: Ours may take so much of the time by hand; the recorder so much more.
TARGET, RECORDED = 1.05, 1.03
CONFIDENCE = 0.95
KINDS = ("ours", "hand", "recorded")
#: A step leaves caches and memory as it found use for them: each kind follows each other as often.
ORDERS = tuple(permutations(KINDS))


def small_llama():
    return transformer(
        layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=2048, max_seq_len=TRAIN.seq_len, gated=True
    )


class Ratio(msgspec.Struct, frozen=True):
    """A ratio's median and interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a row measured: seconds of a step of each kind, by round, elapsed on the slower rank and of processor on
    all; and the ratios of ours to by hand (``elapsed``, ``processor``) and of recorded to ours."""

    plan: str
    seconds: dict[str, list[float]]
    processor_seconds: dict[str, list[float]]
    elapsed: Ratio
    processor: Ratio
    recorded: Ratio
    recorded_processor: Ratio


def ratio(above: list[float], below: list[float], confidence: float = CONFIDENCE) -> Ratio:
    """Median of the rounds' ratios, between the innermost order statistics that hold the true median with this
    confidence, whatever the distribution (Thompson 1936): with n rounds, the k-th from either end with probability
    1 - 2 P(Binomial(n, 1/2) < k). With fewer than 6 rounds none does at 95%, and the ends are those of the rounds."""
    found = sorted(a / b for a, b in zip(above, below, strict=True))
    n, k, outside = len(found), 0, 0.0
    while k < n // 2 and (outside := outside + 2 * comb(n, k) / 2**n) <= 1 - confidence:
        k += 1
    k = max(k, 1)
    return Ratio(median(found), found[k - 1], found[n - k])


def measure(name: str, repeats: int) -> Row:
    """One row: two processes, every kind of step in turn."""
    plan, hand = ROWS[name]
    found = launch(2, _take_turns, plan, hand, repeats, timeout_s=3600.0)
    elapsed = {kind: [max(ranks) for ranks in zip(*(f[kind][0] for f in found))] for kind in KINDS}
    processor = {kind: [sum(ranks) for ranks in zip(*(f[kind][1] for f in found))] for kind in KINDS}
    return Row(
        plan=plan,
        seconds=elapsed,
        processor_seconds=processor,
        elapsed=ratio(elapsed["ours"], elapsed["hand"]),
        processor=ratio(processor["ours"], processor["hand"]),
        recorded=ratio(elapsed["recorded"], elapsed["ours"]),
        recorded_processor=ratio(processor["recorded"], processor["ours"]),
    )


def _take_turns(rank: int, plan_text: str, hand: Callable, repeats: int) -> dict[str, tuple[list, list]]:
    """Elapsed and processor seconds of every counted step of one process, by kind."""
    model, plan, settings = small_llama(), parse(plan_text).on(2), Settings()
    mesh = build(plan)
    ours = [Trainer(model, plan, TRAIN, mesh, settings=settings) for _ in range(2)]
    by_hand_step = hand(model, TRAIN, MICROBATCH, settings)
    recorder = record.Recorder(rank=rank, keep=2)

    def train(trainer: Trainer, tokens: torch.Tensor) -> tuple[float, float]:
        result = trainer.step(Batch(tokens, None))
        trainer.settle()
        return result.loss, result.grad_norm

    def recorded(tokens: torch.Tensor) -> tuple[float, float]:
        record.install(recorder)
        try:
            return train(ours[1], tokens)
        finally:
            record.install(record.Off())

    kinds = {"ours": lambda tokens: train(ours[0], tokens), "hand": by_hand_step, "recorded": recorded}
    out: dict[str, tuple[list, list]] = {kind: ([], []) for kind in KINDS}
    count = TRAIN.global_batch // plan.layout.dp
    for turn in range(-WARMUP, repeats):
        generator = torch.Generator().manual_seed(turn + WARMUP)
        tokens = torch.randint(0, model.vocab, (TRAIN.global_batch, TRAIN.seq_len + 1), generator=generator)
        mine = tokens.split(count)[mesh["dp"].index]
        seen = {}
        for kind in ORDERS[turn % len(ORDERS)]:
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            seen[kind] = kinds[kind](mine)
            if turn >= 0:
                out[kind][0].append(time.perf_counter() - began)
                out[kind][1].append(time.process_time() - worked)
        _same(seen)
    return out


def _same(seen: dict[str, tuple[float, float]]) -> None:
    """All kinds train the same: fp32 losses agree closely, norms of gradients a little less."""
    for kind, (loss, norm) in seen.items():
        wanted_loss, wanted_norm = seen["ours"]
        if abs(loss - wanted_loss) > 1e-4 * wanted_loss or abs(norm - wanted_norm) > 2e-3 * wanted_norm:
            raise AssertionError(f"{kind} trained something else: {seen}")


def line(name: str, row: Row) -> str:
    ours, hand = (median(row.seconds[kind]) * 1e3 for kind in ("ours", "hand"))
    verdict = "met" if row.elapsed.middle <= TARGET else "missed"
    return (
        f"{name:12s} {row.plan:26s} {ours:8.1f} {hand:8.1f}  {row.elapsed!s:25s} {row.processor!s:25s} {verdict:7s} "
        f"{row.recorded!s:25s} {row.recorded_processor!s}"
    )


HEADER = (
    f"{'':12s} {'plan':26s} {'ours ms':>8s} {'hand ms':>8s}  {'ours / by hand':25s} {'of processor time':25s} "
    f"{f'<= {TARGET}':7s} {'recorded / ours':25s} of processor time"
)


def main() -> None:
    """Measure the chosen rows and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.executor", description=__doc__.splitlines()[0])
    parser.add_argument("row", nargs="*", help=f"which: {', '.join(ROWS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    asked = parser.parse_args()
    unknown = [name for name in asked.row if name not in ROWS]
    if unknown:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    found = {}
    if not asked.json:
        print(HEADER)
    for name in asked.row or ROWS:
        found[name] = measure(name, asked.repeats)
        print(line(name, found[name]), file=sys.stderr if asked.json else sys.stdout, flush=True)
    if asked.json:
        print(json.dumps(msgspec.to_builtins(found), indent=1))


if __name__ == "__main__":
    main()
