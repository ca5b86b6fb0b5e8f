"""Pools in an answer: what each of them does of a step, and which one the others wait for."""

from __future__ import annotations

import msgspec

from meshwright.answer.prediction import PoolShare, RankMemory
from meshwright.lower import Lowered
from meshwright.timeline import Timeline


def pool_shares(timeline: Timeline, lowered: Lowered, ranks: tuple[RankMemory, ...]) -> tuple[PoolShare, ...]:
    """The part of each pool in a step, in the plan's order; empty where there is one. `ranks` are the memory of every
    rank class."""
    if not lowered.several:
        return ()
    out = []
    for part in lowered.parts:
        mine = range(part.first, part.first + len(part.static_bytes))
        busy = [timeline.busy_s(rank) / timeline.makespan_s for rank in mine]
        counts = [timeline.ranks[rank].multiplicity for rank in mine]
        fullest = min((ranks[rank] for rank in mine), key=lambda rank: rank.headroom_bytes)
        out.append(
            PoolShare(
                name=part.pool,
                num_ranks=sum(counts),
                busy=max(busy),
                waits=1.0 - sum(b * n for b, n in zip(busy, counts)) / sum(counts),
                peak_bytes=fullest.peak_bytes,
                capacity_bytes=fullest.capacity_bytes,
                bottleneck=False,
            )
        )
    most = max(range(len(out)), key=lambda i: out[i].busy)
    out[most] = msgspec.structs.replace(out[most], bottleneck=True)
    return tuple(out)
