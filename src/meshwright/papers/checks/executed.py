"""Checks of checkpoints by training with real processes, two of them on this machine, in float64 on the text that comes
along."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright.papers.outcome import Check, Fact, Outcome
from meshwright.plan import parse
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=2, hidden=32, heads=4, kv_heads=2, vocab=257, ffn=48, gated=True, max_seq_len=32)
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
STEPS, TURN, RANKS = 6, 3, 2
#: Relative; summation order is what differs.
TOLERANCE = 1e-9


class Run(NamedTuple):
    """A run of two processes: what it does besides training."""

    plan: str
    steps: int
    more: Mapping[str, Any] = MappingProxyType({})


def _losses(runs: list[Run], ranks: int = RANKS) -> list[list[float]]:
    """Losses of the steps that each run does, one after the other in one job."""
    from meshwright.run import launch, loop
    from meshwright.run.settings import Settings

    settings = Settings(precision="float64", lr=1e-2)
    jobs = [
        loop.Job(
            model=MODEL, plan=parse(plan).on(ranks), train=TRAIN, settings=settings, steps=steps, quiet=True, **more
        )
        for plan, steps, more in runs
    ]
    return launch.start(_all, jobs, num_ranks=ranks, device="cpu")


def _all(world: Any, jobs: list[Any]) -> list[list[float]]:
    from meshwright.run import loop

    return [loop.train(world, job)["losses"] for job in jobs]


def _same(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= TOLERANCE * abs(y) for x, y in zip(a, b))


def ucp() -> Outcome:
    """Saved under one layout, resumed under others: the losses of a run that was never interrupted."""
    turns = (("tp2", "pp2 zb-h1"), ("dp2 zero1", "tp2"), ("pp2", "dp2 zero3"))
    (whole,) = _losses([Run("dp1 mb4", STEPS)], ranks=1)
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for number, (before, after) in enumerate(turns):
            out = str(Path(folder) / str(number))
            runs += [Run(before, TURN, {"out": out}), Run(after, STEPS, {"out": out, "resume": True})]
        found = _losses(runs)
    facts = [
        Fact(
            f"{TURN} steps under {before}, then {STEPS - TURN} under {after}, have the losses of one process",
            _same(first + rest, whole),
        )
        for (before, after), first, rest in zip(turns, found[::2], found[1::2])
    ]
    return Outcome(
        facts=tuple(facts),
        baseline="the same steps in one process without a checkpoint",
        assumptions=("the paper gives no figure; its claim is that the resumed training is the same",),
    )


def datastates() -> Outcome:
    """Checkpoints copied during the next step change nothing, and each of them is whole."""
    with tempfile.TemporaryDirectory() as folder:
        saving = {"out": folder, "save_every": 1}
        runs = [Run("dp2 zero1", STEPS), Run("dp2 zero1", TURN, saving)]
        plain, saved = _losses(runs)
        kept = len(list(Path(folder).glob("step-*")))
        (rest,) = _losses([Run("dp2 zero1", STEPS, saving | {"resume": True})])
    return Outcome(
        facts=(
            Fact(
                "with a checkpoint copied during every step the losses are those without any",
                _same(saved, plain[:TURN]),
            ),
            Fact(
                "a checkpoint copied during a step is resumed with the losses of no interruption",
                kept > 0 and _same(rest, plain[TURN:]),
            ),
        ),
        baseline="the same steps without checkpoints",
        missing=("the speed-up over synchronous saving, which is of GPU memory and not measured here",),
    )


CHECKS = {"ucp": Check(ucp, needs="run"), "datastates-llm": Check(datastates, needs="run")}
