"""Faults: slow ranks and links that a diagnosis has to name, and processes whose death a run has to survive."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import numpy as np

from meshwright.answer.predict import predict
from meshwright.answer.replan import replanned
from meshwright.graph import RankClass
from meshwright.papers.outcome import AT_LEAST, Check, Fact, Figure, Outcome, at_most, by_processes
from meshwright.plan import Plan, parse
from meshwright.replay.diagnose import Suspect, suspects
from meshwright.spec.cluster import load
from meshwright.spec.dimensions import transformer
from meshwright.spec.workload import Train
from meshwright.world.trace import read

MODEL = transformer(layers=16, hidden=2048, heads=16, kv_heads=8, vocab=32000, ffn=5632, gated=True)
#: Plans with their devices, each with at least two replicas of a stage.
PLANS = (
    ("pp4 dp4 mb1 zero1", 16),
    ("pp4 dp2 mb1", 8),
    ("pp8 dp2 mb1", 16),
    ("pp2 dp4 mb1 zero1 gpipe", 8),
    ("pp4 vpp2 dp2 mb1 interleaved", 8),
    ("pp4 dp4 mb2 zb-h1", 16),
)
JITTER = 0.02
#: Target: the share that is named rightly.
TARGET = 0.95


def place(plan: Plan, rank: int) -> tuple[int, int]:
    """A rank's replica and pipeline rank."""
    layout = plan.layout
    return rank // layout.stride("dp") % layout.dp, rank // layout.stride("pp") % layout.pp


def drawn(rng: np.random.Generator, plan: Plan) -> tuple[str, str, tuple[int, ...]]:
    """A fault: its words, the kind of suspect that it is, and its ranks."""
    layout = plan.layout
    rank = int(rng.integers(layout.num_ranks))
    kind = ("rank", "link", "nic")[int(rng.integers(3))]
    if kind == "rank":
        return f"slow={rank}x{rng.uniform(1.2, 3):.3f}", kind, (rank,)
    factor = rng.uniform(1.5, 5)
    if kind == "nic":
        return f"slownic={rank}x{factor:.3f}", kind, (rank,)
    stride = layout.stride("pp")
    other = rank + stride if rank // stride % layout.pp < layout.pp - 1 else rank - stride
    pair = tuple(sorted((rank, other)))
    return f"slowlink={pair[0]}-{pair[1]}x{factor:.3f}", kind, pair


def right(
    found: tuple[Suspect, ...], ranks: tuple[RankClass, ...], plan: Plan, kind: str, who: tuple[int, ...]
) -> bool:
    """Whether the only suspect is the injected one."""
    if len(found) != 1 or found[0].what != kind:
        return False
    named = {(dict(ranks[r].at).get("dp", 0), ranks[r].stage) for r in found[0].ranks}
    return named == {place(plan, rank) for rank in who}


def judged(cases: int, seed: int) -> list[tuple[str, str, bool, str]]:
    """(plan, fault, whether it was named rightly, what was named) of every case."""
    rng, out = np.random.default_rng(seed), []
    for case in range(cases):
        text, devices = PLANS[case % len(PLANS)]
        plan = parse(text).on(devices)
        words, kind, who = drawn(rng, plan)
        train = Train(
            global_batch=plan.layout.dp * plan.pipeline.microbatch * plan.layout.pp, seq_len=2048, dtype="bf16"
        )
        world = read(f"{words},ranks=lognormal:{JITTER},seed={case}")
        traced = predict(MODEL, load(f"{devices}xh100"), train, plan, detail=False, world=world).timeline
        found = suspects(traced)
        named = "; ".join(f"{one.what} {', '.join(traced.ranks[r].name for r in one.ranks)}" for one in found)
        out.append((text, words, right(found, traced.ranks, plan, kind, who), named))
    return out


#: Faults that the check injects, two of every plan.
CASES = 2 * len(PLANS)


def c4() -> Outcome:
    """Slow ranks, links and ports are injected into simulated steps, and read off their times."""
    found = judged(CASES, seed=5)
    share = sum(good for _, _, good, _ in found) / len(found)
    return Outcome(
        figures=(
            Figure(f"{CASES} injected slow ranks, links and ports, named rightly", None, share, "", AT_LEAST, TARGET),
        ),
        baseline="the traces of the same steps, without a diagnosis",
        assumptions=(f"ranks differ by a lognormal of {JITTER:g} besides; the paper gives no share of faults found",),
        missing=("error-induced overhead is that of a production cluster's months, whose failures are not published",),
    )


def elaswave() -> Outcome:
    """A run loses a process and goes on with those that are left; a job in a world of failures, restarted and not."""
    whole = Outcome(
        facts=(_in_a_world(),),
        baseline="the same steps undisturbed; the same job restarted from checkpoints",
        missing=(
            "1.35x and 1.60x are over ReCycle's and TorchFT's own throughputs on 96 NPUs",
            "clocks are not raised on the stages that have more layers",
        ),
    )
    return by_processes(whole, "going on after a kill", _killed)


def _in_a_world() -> Fact:
    """Without spares an elastic job is done before one that waits for repairs."""
    model, cluster, plan = MODEL, load("16xh100"), parse("pp2 dp8 mb1 zero1 full")
    train = Train(global_batch=64, seq_len=2048, dtype="bf16", tokens=1e9)
    words = "mtbf=30m,spares=0,repair=2h,restart=5m,save=10s,draws=5,recovery="
    seconds = {
        way: predict(model, cluster, train, plan, detail=False, world=read(words + way)).run.seconds
        for way in ("checkpoint", "elastic")
    }
    return Fact(
        "an elastic job without spares is done before one that waits for repairs",
        seconds["elastic"] < seconds["checkpoint"],
    )


def _killed() -> Outcome:
    """Two stages, of which one host is killed: the other one takes all layers, and a new one joins."""
    from meshwright.run import data
    from meshwright.run.data import tokenizer
    from meshwright.run.elastic.launcher import Formed, run
    from meshwright.run.job import Job
    from meshwright.run.settings import Settings
    from meshwright.world.elastic import Elastic

    model = transformer(layers=2, hidden=16, heads=2, kv_heads=1, vocab=260, ffn=24, gated=True, max_seq_len=32)
    train, plan = Train(global_batch=3, seq_len=16, dtype="fp32"), parse("pp2").on(2)
    alone = replanned(model, load("2xh100"), train, plan, 1)
    formed = {2: Formed(plan), 1: Formed(alone.plan, alone.counts, alone.params)}
    with tempfile.TemporaryDirectory() as folder:
        corpus = str(data.build("sample", tokenizer.Bytes(), Path(folder)))
        settings = Settings(precision="float64", lr=1e-2)
        job = Job(model=model, plan=plan, train=train, settings=settings, corpus=corpus, steps=12, quiet=True)
        left = [True]

        def kill(pids: dict[int, int]) -> None:
            if left:
                left.pop()
                os.kill(min(pids), signal.SIGKILL)

        plain, killed = (run(job, Elastic(sizes=(1, 2), spares=0), formed.__getitem__, whole=w) for w in (None, kill))
    furthest = max(abs(a - b) / abs(a) for a, b in zip(plain.losses, killed.losses, strict=True))
    ranks = [one.ranks for one in killed.recoveries]
    again = max((one.repeated for one in killed.recoveries), default=99)
    return Outcome(
        figures=(
            at_most("losses of a run that lost a stage, furthest from the undisturbed one's", furthest, 1e-9),
            at_most("steps repeated after a kill", again, 1),
        ),
        facts=(Fact("the stages that are left take the layers, and a new one joins", ranks == [1, 2]),),
    )


CHECKS = {"c4": Check(c4), "elaswave": Check(elaswave)}
