"""Groups within groups: a rank works on a piece of a document of many nodes, of one of its node, and on its own ones.

``zeppelin`` (Chen et al., 2025, 2509.21841) sorts documents into three zones, of several nodes, of one node and of one
rank, by what they take, and every rank works on its part of each, from the largest zone in. A document is cut until its
share of a rank is within a target; the longest first, each goes to the ranks that have least to do. Of several targets
around the mean the best is kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.assign.groups import GroupMethod, GroupProblem, RankGroup, Round
from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, native

#: Targets of a document's share of a rank, over what every rank has to do in the mean.
TARGETS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.0)


def zones(problem: GroupProblem, some: NDArray[np.int64]) -> Round:
    """Return the groups of one round, the largest first; () where no rank has room for what is left."""
    some = some[np.argsort(-problem.lengths[some], kind="stable")]
    lengths = np.ascontiguousarray(problem.lengths[some])
    each, least = problem.costs.shares(lengths), problem.least[some]
    degrees, start, _, _ = problem.costs.arrays
    ways = np.arange(len(degrees))
    mean = float((each * degrees)[np.arange(len(some)), least].sum()) / problem.ranks
    room = problem.capacity if problem.together else int(lengths.sum())
    best, found = np.inf, None
    for target in TARGETS:
        within = (each <= target * mean) & (ways >= least[:, None])
        chosen = np.where(within.any(axis=1), within.argmax(axis=1), np.maximum(least, len(degrees) - 1))
        order = np.lexsort((-lengths, -chosen)).astype(np.int64)
        tokens, load = np.zeros(problem.ranks, np.int64), np.full(problem.ranks, start.min())
        first = np.full(len(some), -1, np.int64)
        fits = _nest(
            lengths,
            each.ravel(),
            chosen,
            order,
            degrees,
            len(some),
            len(degrees),
            problem.ranks,
            room,
            tokens,
            load,
            first,
        )
        value = float(load.max())
        if fits and value < best:
            best, found = value, (first, chosen)
    if found is None:
        return ()
    at: dict[tuple[int, int], list[int]] = {}
    for number, begin, way in zip(some.tolist(), found[0].tolist(), found[1].tolist()):
        at.setdefault((begin, int(degrees[way])), []).append(number)
    groups = [RankGroup(begin, size, tuple(sorted(numbers))) for (begin, size), numbers in at.items()]
    return tuple(sorted(groups, key=lambda g: (-g.size, g.first)))


@native("count", "ranks")
def _nest(
    lengths: Int64s,
    each: Float64s,
    chosen: Int64s,
    order: Int64s,
    degrees: Int64s,
    count: int,
    ways: int,
    ranks: int,
    capacity: int,
    tokens: OutInt64s,
    load: OutFloat64s,
    first: OutInt64s,
) -> int:
    """Return whether all documents have room. Writes the ``first`` rank of each one's group, and each rank's ``tokens``
    and ``load``."""
    for position in range(count):
        item = order[position]
        way = chosen[item]
        size = degrees[way]
        share = (lengths[item] + size - 1) // size
        where, least = -1, 0.0
        begin = 0
        while begin + size <= ranks:
            worst, fits = 0.0, 1
            for rank in range(begin, begin + size):
                if tokens[rank] + share > capacity:
                    fits = 0
                    break
                if load[rank] > worst:
                    worst = load[rank]
            if fits == 1 and (where < 0 or worst < least):
                where, least = begin, worst
            begin += size
        if where < 0:
            return 0
        first[item] = where
        for rank in range(where, where + size):
            tokens[rank] += share
            load[rank] += each[item * ways + way]
    return 1


METHODS = (
    GroupMethod(
        name="zeppelin",
        words="documents of many nodes, of one node and of one rank in zones; every rank has a part of each",
        paper="Chen et al., 2025, 2509.21841",
        form=zones,
        nested=True,
    ),
)
