"""Checkpoints: resumed under other layouts, and copied beside training.

What training computes is checked by training with real processes, two of them on this machine, in float64 on the text
that comes along; what saving costs is simulated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright.answer.predict import predict
from meshwright.papers.outcome import SHOWN, Check, Fact, Figure, Outcome, at_most, by_processes
from meshwright.plan import parse
from meshwright.spec.cluster import load as load_cluster
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train

MODEL = transformer(layers=2, hidden=32, heads=4, kv_heads=2, vocab=257, ffn=48, gated=True, max_seq_len=32)
TRAIN = Train(global_batch=4, seq_len=16, dtype="fp32")
STEPS, TURN, RANKS = 6, 3, 2
#: Relative; summation order is what differs.
TOLERANCE = 1e-9


class ProcessesRun(NamedTuple):
    """A run of two processes: what it does besides training."""

    plan: str
    steps: int
    more: Mapping[str, Any] = MappingProxyType({})


def _losses(runs: list[ProcessesRun], ranks: int = RANKS) -> list[list[float]]:
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


def _furthest(a: list[float], b: list[float]) -> float:
    """The largest difference between losses of the same steps, relative; infinite where they are not as many."""
    return max((abs(x - y) / abs(y) for x, y in zip(a, b)), default=inf) if len(a) == len(b) else inf


def _same(a: list[float], b: list[float]) -> bool:
    return _furthest(a, b) <= TOLERANCE


def ucp() -> Outcome:
    """Saved under one layout, resumed under others: the losses of a run that was never interrupted."""
    claim = Outcome(
        baseline="the same steps in one process without a checkpoint",
        assumptions=("the paper gives no figure; its claim is that the resumed training is the same",),
    )
    return by_processes(claim, "saving under one layout and resuming under others", _resumed)


def _resumed() -> Outcome:
    turns = (("tp2", "pp2 zb-h1"), ("dp2 zero1", "tp2"), ("pp2", "dp2 zero3"))
    (whole,) = _losses([ProcessesRun("dp1 mb4", STEPS)], ranks=1)
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for number, (before, after) in enumerate(turns):
            out = str(Path(folder) / str(number))
            runs += [ProcessesRun(before, TURN, {"out": out}), ProcessesRun(after, STEPS, {"out": out, "resume": True})]
        found = _losses(runs)
    figures = [
        at_most(
            f"{TURN} steps under {before}, then {STEPS - TURN} under {after}: losses, furthest from one process",
            _furthest(first + rest, whole),
            TOLERANCE,
            headline=True,
        )
        for (before, after), first, rest in zip(turns, found[::2], found[1::2])
    ]
    return Outcome(figures=tuple(figures))


class Saving(NamedTuple):
    """The step and the checkpoint of one GPU: seconds of forward and backward and of the update, bytes of its
    checkpoint, bytes a second to the host and from there to storage, and how many checkpoints the host can hold."""

    pass_s: float
    update_s: float
    num_bytes: float
    copy_bytes_s: float
    store_bytes_s: float
    slots: int = 2


def trained_s(s: Saving, steps: int, every: int, *, lazy: bool) -> float:
    """Seconds until so many steps are done and every checkpoint is stored.

    A synchronous save copies and stores between two steps. A lazy one copies beside the next forward and backward,
    which change nothing of it: only the update waits for the copy, and a copy for a free slot in the host (Maurya et
    al., 2024, 2406.10707).
    """
    clock = copied = 0.0
    stored = [0.0] * s.slots  # when each of the last checkpoints was stored
    copy_s, store_s = s.num_bytes / s.copy_bytes_s, s.num_bytes / s.store_bytes_s
    for step in range(1, steps + 1):
        clock = max(clock + s.pass_s, copied) + s.update_s
        if every and step % every == 0:
            if not lazy:
                clock += copy_s + store_s
                continue
            copied = max(clock, stored[0]) + copy_s
            stored = [*stored[1:], max(copied, stored[-1]) + store_s]
    return max(clock, stored[-1])


INPUTS = "the abstract's largest gain; its model, step, storage and frequency are not known here"


def _saving() -> tuple[Figure, list[Fact]]:
    """A 13B model on 16 A100 that saves 14 bytes a parameter after every step."""
    gpt = transformer(layers=40, hidden=5120, heads=40, vocab=32000, max_seq_len=2048)
    asked = load_cluster("16xa100-40"), Train(global_batch=16, seq_len=2048)
    step_s = predict(gpt, *asked, parse("tp4 pp4 mb1 zero1 full"), detail=False).step_time_s
    one = Saving(0.97 * step_s, 0.03 * step_s, 14 * gpt.num_params / 16, 25e9, 1e9)
    times = {(every, lazy): trained_s(one, 50, every, lazy=lazy) for every in (1, 10, 50) for lazy in (False, True)}
    rare, never = trained_s(one, 50, 25, lazy=True), trained_s(one, 50, 0, lazy=True)
    slow = one._replace(copy_bytes_s=one.num_bytes / (2 * one.pass_s))
    gain = Figure(
        "13B saved after every step, synchronous over lazy",
        2.2,
        times[1, False] / times[1, True],
        "x",
        SHOWN,
        why=INPUTS,
    )
    return gain, [
        Fact("lazy saving is never slower", all(times[e, True] <= times[e, False] for e in (1, 10, 50))),
        Fact("seldom enough, it costs no step anything", rare - never <= one.num_bytes / one.store_bytes_s + 1.0),
        Fact(
            "the update waits where a copy outlasts forward and backward",
            trained_s(slow, 2, 1, lazy=True) > trained_s(one, 2, 1, lazy=True) + one.pass_s / 2,
        ),
    ]


def datastates() -> Outcome:
    """Simulate the cost of lazy checkpoints; then, where processes can be had, check that copies overlapped with a step
    leave it unchanged and that each copy is whole."""
    gain, facts = _saving()
    found = Outcome(
        figures=(gain,),
        facts=tuple(facts),
        baseline="the same steps without checkpoints; checkpoints between steps",
        assumptions=(
            "16 A100 with tp4 pp4, 25 GB/s to the host, 1 GB/s a GPU to storage, two checkpoints in the host: assumed",
            "2.2x end to end and 48x in blocked time are the abstract's largest: neither is judged, as with assumed "
            "bandwidths any gain comes out",
        ),
        missing=("its model, storage and frequency, behind 2.2x and 48x",),
    )
    return by_processes(found, "saving beside real training", lambda: Outcome(facts=_saved_beside_training()))


def _saved_beside_training() -> tuple[Fact, ...]:
    with tempfile.TemporaryDirectory() as folder:
        saving = {"out": folder, "save_every": 1}
        runs = [ProcessesRun("dp2 zero1", STEPS), ProcessesRun("dp2 zero1", TURN, saving)]
        plain, saved = _losses(runs)
        kept = len(list(Path(folder).glob("step-*")))
        (rest,) = _losses([ProcessesRun("dp2 zero1", STEPS, saving | {"resume": True})])
    return (
        Fact("with a checkpoint copied during every step the losses are those without any", _same(saved, plain[:TURN])),
        Fact(
            "a checkpoint copied during a step is resumed with the losses of no interruption",
            kept > 0 and _same(rest, plain[TURN:]),
        ),
    )


CHECKS = {"ucp": Check(ucp), "datastates-llm": Check(datastates)}
