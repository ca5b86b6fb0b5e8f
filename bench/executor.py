"""Our training step beside the same plan written by hand on torch's own parts, and with the recorder on.

Run: python -m bench.executor [--repeats 12] [--json] [ROW ...]

Each row is one plan on two gloo processes of one torch thread. The three kinds of step (ours, by hand, ours recorded)
take turns in one run (:mod:`bench.turns`), and their losses are checked to be those of one training. A ratio is the
median of the rounds' ratios, with the interval that its order statistics give; beside that of the elapsed time is that
of the processors' time, on which other work on the machine has less influence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from statistics import median

import msgspec
import torch
from tests.run.processes import launch

from bench import by_hand
from bench.turns import Ratio, ratio, sequences, take_turns, together
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
    "transformers-ddp": ("dp2 mb2", by_hand.published_ddp),
    "transformers-fsdp": ("dp2 zero3 mb2", by_hand.published_fsdp),
}
TRAIN = Train(global_batch=16, seq_len=128, dtype="fp32")
MICROBATCH, WARMUP = 2, 2
#: Ours may take so much of the time by hand; the recorder so much more.
TARGET, RECORDED = 1.05, 1.03
#: Of the rows beside transformers' Llama.
TARGETS = {"transformers-ddp": 1.02, "transformers-fsdp": 1.03}
KINDS = ("ours", "hand", "recorded")


def small_llama():
    return transformer(
        layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=2048, max_seq_len=TRAIN.seq_len, gated=True
    )


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


def measure(name: str, repeats: int) -> Row:
    """One row: two processes, every kind of step in turn."""
    plan, hand = ROWS[name]
    found = launch(2, _take_turns, plan, hand, repeats, timeout_s=3600.0)
    elapsed, processor = together(found)
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
    return take_turns(
        kinds, lambda number: sequences(TRAIN, model.vocab, mesh, number), repeats=repeats, warmup=WARMUP, check=_same
    )


def _same(seen: dict[str, tuple[float, float]]) -> None:
    """All kinds train the same: fp32 losses agree closely, norms of gradients a little less."""
    for kind, (loss, norm) in seen.items():
        wanted_loss, wanted_norm = seen["ours"]
        if abs(loss - wanted_loss) > 1e-4 * wanted_loss or abs(norm - wanted_norm) > 2e-3 * wanted_norm:
            raise AssertionError(f"{kind} trained something else: {seen}")


def line(name: str, row: Row) -> str:
    ours, hand = (median(row.seconds[kind]) * 1e3 for kind in ("ours", "hand"))
    verdict = "met" if row.elapsed.middle <= TARGETS.get(name, TARGET) else "missed"
    return (
        f"{name:17s} {row.plan:26s} {ours:8.1f} {hand:8.1f}  {row.elapsed!s:25s} {row.processor!s:25s} {verdict:7s} "
        f"{row.recorded!s:25s} {row.recorded_processor!s}"
    )


HEADER = (
    f"{'':17s} {'plan':26s} {'ours ms':>8s} {'hand ms':>8s}  {'ours / by hand':25s} {'of processor time':25s} "
    f"{'target':7s} {'recorded / ours':25s} of processor time"
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
