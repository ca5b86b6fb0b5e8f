"""Slow ranks and links that are injected into simulated steps, and how many of them a diagnosis names rightly.

Run: python -m bench.diagnose [--cases 60] [--seed 0] [--json]

Every case draws a plan, a fault (a rank that computes 1.2 to 3 times as long, a link between pipeline neighbours or all
links of a rank at 1.5 to 5 times) and a factor for every rank from a lognormal of 0.02, which nobody is to be blamed
for. A case is right when its first suspect is the injected one, by kind and rank, and no other is named.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

from meshwright.answer.predict import predict
from meshwright.graph import RankClass
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


def main() -> None:
    said = argparse.ArgumentParser(prog="python -m bench.diagnose", description=__doc__.splitlines()[0])
    said.add_argument("--cases", type=int, default=60)
    said.add_argument("--seed", type=int, default=0)
    said.add_argument("--json", action="store_true")
    asked = said.parse_args()
    found = judged(asked.cases, asked.seed)
    share = sum(good for _, _, good, _ in found) / len(found)
    if asked.json:
        json.dump({"cases": len(found), "right": share, "wrong": [one for one in found if not one[2]]}, sys.stdout)
        print()
    else:
        for plan, words, good, named in found:
            if not good:
                print(f"wrong: {plan} {words}: {named or 'nothing'}")
        print(f"{share:.1%} of {len(found)} named rightly, {TARGET:.0%} wanted")
    sys.exit(0 if share >= TARGET else 1)


if __name__ == "__main__":
    main()
