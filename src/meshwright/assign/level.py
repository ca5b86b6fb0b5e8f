"""Shards of state by what ranks have room for: the sizes whose largest is least, by filling up to one level.

Exchanges of shards of unequal size take as long as the largest, so that nobody should hold more than is needed for the
others to fit. Ranks whose room is below the level hold what they have room for, all others as much as each other.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Whole numbers of a level that an even share is divided into.
PARTS = 1000


def level(room: Sequence[float], members: Sequence[int]) -> tuple[int, ...] | None:
    """Relative sizes of the shard of every rank of each kind, whole numbers that none exceeds its room by; None where
    all have too little room together, () where an even share fits everybody.

    Args:
        room: what a rank of each kind can hold, in even shares [K]: 1.0 is the mean of all.
        members: ranks of each kind [K].
    """
    if min(room) >= 1.0:
        return ()
    total = PARTS * sum(members)
    most = [int(PARTS * max(0.0, one)) for one in room]
    out, left, ranks = [0] * len(room), total, sum(members)
    for kind in sorted(range(len(room)), key=lambda k: most[k]):
        out[kind] = min(most[kind], -(-left // ranks))
        left, ranks = left - out[kind] * members[kind], ranks - members[kind]
    return tuple(out) if left <= 0 else None
