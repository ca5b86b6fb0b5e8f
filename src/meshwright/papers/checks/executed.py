"""Checks that train with real processes, two of them on this machine, in float64 on the text that comes along."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from meshwright.papers.outcome import Check, Fact, Outcome
from meshwright.plan import parse
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=2, hidden=32, heads=4, kv_heads=2, vocab=257, ffn=48, gated=True, max_seq_len=32)
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
STEPS, TURN = 6, 3
#: Relative; summation order is what differs.
TOLERANCE = 1e-9


def _losses(plan: str, steps: int, **options: Any) -> list[float]:
    """Losses of the steps that one run does under a plan."""
    from meshwright.run import launch, loop
    from meshwright.run.settings import Settings

    read = parse(plan)
    ranks = read.layout.tp * read.layout.pp * read.layout.cp * max(1, read.layout.dp)
    settings = Settings(precision="float64", lr=1e-2)
    job = loop.Job(model=MODEL, plan=read.on(ranks), train=TRAIN, settings=settings, steps=steps, **options)
    return launch.start(loop.train, job, num_ranks=ranks, device="cpu")["losses"]


def _same(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= TOLERANCE * abs(y) for x, y in zip(a, b))


def ucp() -> Outcome:
    """Saved under one layout, resumed under others: the losses of a run that was never interrupted."""
    whole = _losses("dp1 mb4", STEPS)
    facts = []
    for before, after in (("tp2", "pp2 zb-h1"), ("dp2 zero1", "tp2"), ("pp2", "dp2 zero3")):
        with tempfile.TemporaryDirectory() as folder:
            first = _losses(before, TURN, out=folder)
            rest = _losses(after, STEPS, out=folder, resume=True)
        text = f"{TURN} steps under {before}, then {STEPS - TURN} under {after}, have the losses of one process"
        facts.append(Fact(text, _same(first + rest, whole)))
    return Outcome(
        facts=tuple(facts),
        baseline="the same steps in one process without a checkpoint",
        assumptions=("the paper gives no figure; its claim is that the resumed training is the same",),
    )


def datastates() -> Outcome:
    """Checkpoints copied during the next step change nothing, and each of them is whole."""
    plain = _losses("dp2 zero1", STEPS)
    with tempfile.TemporaryDirectory() as folder:
        saved = _losses("dp2 zero1", TURN, out=folder, save_every=1)
        kept = len(list(Path(folder).glob("step-*")))
        rest = _losses("dp2 zero1", STEPS, out=folder, resume=True, save_every=1)
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


def dpro() -> Outcome:
    """What it needs is there (recorder, clocks, replay); the figure is not shown within the paper's 5%."""
    return Outcome(missing=("a replay of a real job held to 5%, and a what-if confirmed by a second run",))


CHECKS = {
    "ucp": Check(ucp, needs="run"),
    "datastates-llm": Check(datastates, needs="run"),
    "dpro": Check(dpro, needs="run"),
}
