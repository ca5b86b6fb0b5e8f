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
from meshwright.world.trace import read

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


INPUTS = "the abstract's largest gain; its model, step, storage and frequency are not known here"
#: Steps of the saved run, and bytes a second of a GPU to storage.
SAVED_STEPS, STORED_BYTES_S = 50, 1e9


def _run_s(every: float, saving: str) -> float:
    """Seconds of a run of a 13B model on 16 A100 that saves 14 bytes a parameter, asked of the common predictor; a
    checkpoint about every so many steps."""
    gpt = transformer(layers=40, hidden=5120, heads=40, vocab=32000, max_seq_len=2048)
    cluster, plan = load_cluster("16xa100-40"), parse("tp4 pp4 mb1 zero1 full")
    train = Train(global_batch=16, seq_len=2048, tokens=SAVED_STEPS * 16 * 2048)
    step_s = predict(gpt, cluster, train, plan, detail=False).step_time_s
    save_s = 14 * gpt.num_params / 16 / STORED_BYTES_S
    words = f"mtbf=5000w,draws=1,save={save_s:.3f}s,checkpoint={every * step_s:.4f}s,saving={saving}"
    return predict(gpt, cluster, train, plan, detail=False, world=read(words)).run.seconds


def _saving() -> tuple[Figure, list[Fact]]:
    """Blocking and lazy checkpoints of the same run, after every step and seldom."""
    times = {(every, saving): _run_s(every, saving) for every in (1, 25) for saving in ("blocking", "lazy")}
    never = _run_s(SAVED_STEPS, "lazy")
    gain = Figure(
        "13B saved after every step, synchronous over lazy",
        2.2,
        times[1, "blocking"] / times[1, "lazy"],
        "x",
        SHOWN,
        why=INPUTS,
    )
    return gain, [
        Fact("lazy saving is never slower", all(times[e, "lazy"] <= times[e, "blocking"] for e in (1, 25))),
        Fact("seldom enough, it costs no step anything", abs(times[25, "lazy"] / never - 1) < 1e-6),
        Fact("saved after every step, the drives are waited for", times[1, "lazy"] > times[25, "lazy"]),
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
            "16 A100 with tp4 pp4, 1 GB/s a GPU to storage: assumed",
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
