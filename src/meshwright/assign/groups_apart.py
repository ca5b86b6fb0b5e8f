"""Groups that are apart: in a round each rank is in one group at most.

``flexsp`` (Wang et al., 2024, 2412.01523) gives a document as many ranks as make the slowest group fastest,
``bytescale`` (2502.21231) as many as hold it. Both are found by a target: for a time that no group may exceed,
documents take the smallest degree that stays within it, the longest first, into groups of their degree, new ones while
there are ranks, and then into larger groups; the least time that works is searched by halving. Moves and swaps between
the groups follow (:mod:`.local_search`). ``flexsp-ilp`` solves the integer program of the paper in place of that.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from meshwright.assign import Assigned, Problem, solve
from meshwright.assign.groups import GroupMethod, GroupProblem, RankGroup, Round
from meshwright.assign.program import LinearRow, minimise
from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, native

#: Halvings of the interval in which the least target lies.
HALVINGS = 24
#: A cost that no group may take: of a document that its ranks do not hold.
NEVER_S = 1e12
#: Assignments up to which all are tried.
ENUMERATED = 20_000
#: A value within so much of its bound is not improved.
NEAR = 1.002
#: Seconds that the integer program of a round has, and the gap at which it ends.
LIMIT_S, GAP = 5.0, 5e-3


def by_time(problem: GroupProblem, some: NDArray[np.int64]) -> Round:
    """Return groups whose degrees are those that make the slowest fastest."""
    return _formed(problem, some, timed=True)


def by_memory(problem: GroupProblem, some: NDArray[np.int64]) -> Round:
    """Return groups of the smallest degrees that hold their documents, with their work evened out."""
    return _formed(problem, some, timed=False)


def _formed(problem: GroupProblem, some: NDArray[np.int64], *, timed: bool) -> Round:
    some = some[np.argsort(-problem.lengths[some], kind="stable")]
    lengths = np.ascontiguousarray(problem.sizes[some])
    each, least = _work(problem, some), problem.least[some]
    degrees, start, _, _ = problem.costs.arrays
    capacity = problem.capacity if problem.together else int(lengths.sum())
    count, ways = len(lengths), len(degrees)

    table, able = each.ravel(), np.arange(ways) >= least[:, None]
    alone = each + start
    kind, group_of = np.full(problem.ranks, -1, np.int64), np.full(count, -1, np.int64)
    tokens, loads = np.zeros(problem.ranks, np.int64), np.zeros(problem.ranks)
    held = _ordered(lengths, least)

    def fit(target: float, lift: int, filling: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Groups within a target, none of them smaller than degree number `lift`."""
        smallest, order = held
        if timed:
            within = (alone <= target) & able
            if not within.any(axis=1).all():
                return None
            smallest, order = _ordered(lengths, np.maximum(within.argmax(axis=1), lift))
        sizes = count, ways, problem.ranks, capacity
        made = _fit(
            lengths, table, smallest, order, degrees, start, *sizes, target, filling, tokens, loads, kind, group_of
        )
        return (kind[:made].copy(), group_of.copy()) if made >= 0 else None

    low = float(np.where(able, alone, np.inf).min(axis=1).max())
    low = max(low, float(np.where(able, each * degrees, np.inf).min(axis=1).sum()) / problem.ranks)
    high = float((each.max(axis=1)).sum() + start.max()) * (1 + 1e-9)  # sums in another order round otherwise
    # small groups waste room: where those do not hold all, larger ones do
    lifts = range(ways if timed else 1)
    lifted = next((k for k in lifts if fit(high, k, 0) or fit(high, k, 1)), None)
    if lifted is None:
        return ()
    tried = sorted({(0, 0), (0, 1), (lifted, 0), (lifted, 1)})

    def any_fit(target: float) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        return next((found for how in tried if (found := fit(target, *how)) is not None), None)

    best = any_fit(high)
    for _ in range(HALVINGS):
        if high - low <= 1e-3 * low:
            break
        middle = (low * high) ** 0.5 if high > 4 * low else (low + high) / 2
        found = any_fit(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    kind, group_of = best
    evened, of = _evened(problem, some, each, kind), each[np.arange(count), kind[group_of]]
    before = start[kind] + np.bincount(group_of, weights=of, minlength=len(kind))
    if (evened.bin_of >= 0).all() and evened.value < before.max():
        group_of = evened.bin_of
    return _laid_out(degrees[kind], some, group_of)


def _ordered(lengths: NDArray[np.int64], smallest: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return documents' smallest degrees (numbers), and the documents, the largest degree and the longest first."""
    return smallest, np.lexsort((-lengths, -smallest)).astype(np.int64)


def _work(problem: GroupProblem, some: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the seconds that documents add to groups of each degree, float64 [N, degrees]; where a group's documents
    come in several microbatches, those begin with every capacity of tokens."""
    lengths = problem.lengths[some]
    each = problem.costs.shares(lengths)
    if problem.together:
        return each
    degrees, start, _, _ = problem.costs.arrays
    return each + start * lengths[:, None] / (degrees * problem.capacity)


def _evened(
    problem: GroupProblem, some: NDArray[np.int64], each: NDArray[np.float64], kind: NDArray[np.int64]
) -> Assigned:
    """Return documents on groups of these degrees, moved and swapped while the slowest becomes faster; `each` is what
    they add to groups of each degree."""
    degrees, start, _, _ = problem.costs.arrays
    room = degrees[kind] * problem.capacity
    lengths = problem.sizes[some]
    costs = np.where(lengths[:, None] <= room, each[:, kind], NEVER_S)
    capacity = room if problem.together else np.full(len(kind), int(lengths.sum()))
    few = len(kind) ** len(some) <= ENUMERATED
    return solve(
        "enumerate" if few else "local-search",
        Problem(sizes=lengths, capacity=capacity, costs=costs, num_bins=len(kind), start=start[kind]),
    )


def improved(problem: GroupProblem, groups: Round, tries: int) -> Round:
    """Return groups of which some were joined or halved, or put on ranks that were left, while the slowest becomes
    faster; so many changes are tried at most."""
    some = np.array(sorted(d for group in groups for d in group.documents), np.int64)
    each, (degrees, start, _, _) = _work(problem, some), problem.costs.arrays
    work = np.where(np.arange(len(degrees)) >= problem.least[some][:, None], each * degrees, np.inf)
    bound = max(float(work.min(axis=1).sum()) / problem.ranks, float((work / degrees + start).min(axis=1).max()))
    kinds = np.searchsorted(degrees, [group.size for group in groups])
    counts = np.bincount(kinds, minlength=len(degrees))
    value, best, tried = slowest(problem, groups), groups, {tuple(counts.tolist())}
    while value > bound * NEAR:
        better = False
        for changed in _neighbours(counts, degrees, problem.ranks):
            key = tuple(changed.tolist())
            if key in tried:
                continue
            tried.add(key)
            if len(tried) > tries:
                return best
            kind = np.repeat(np.arange(len(degrees)), changed)
            if degrees[kind].max() * problem.capacity < problem.sizes[some].max():
                continue
            found = _evened(problem, some, each, kind)
            if (found.bin_of >= 0).all() and found.value < value * (1 - 1e-9):
                value, best, counts = found.value, _laid_out(degrees[kind], some, found.bin_of), changed
                better = True
                break
        if not better:
            return best
    return best


def _neighbours(counts: NDArray[np.int64], degrees: NDArray[np.int64], ranks: int) -> Iterator[NDArray[np.int64]]:
    """Yield numbers of groups of each degree that differ from `counts` in one group joined with another, halved, or
    made on ranks that are left, in one joined and another halved, or in all of a degree joined; and groups that are all
    alike."""
    ways = len(degrees)
    unit = np.eye(ways, dtype=np.int64)
    joins = [2 * -unit[k] + unit[k + 1] for k in range(ways - 1)]
    changes = [unit[k] for k in range(ways)]  # on ranks that are left
    changes += [unit[k + 1] - unit[k] for k in range(ways - 1)]  # grown onto ranks that are left
    changes += [*joins, *(-join for join in joins)]
    changes += [a - b for a in joins for b in joins if a is not b]
    changes += [counts[k] // 2 * joins[k] for k in range(ways - 1)]  # all of a degree joined
    changes += [
        np.where(np.arange(ways) == k, ranks // degrees[k], 0) - counts for k in range(ways)
    ]  # all groups alike
    for change in changes:
        found = counts + change
        if found.min() >= 0 and 0 < found @ degrees <= ranks:
            yield found


def _laid_out(sizes: NDArray[np.int64], some: NDArray[np.int64], group_of: NDArray[np.int64]) -> Round:
    """Place groups on ranks, the largest first, so that each begins at a multiple of its size."""
    groups, first = [], 0
    for one in np.argsort(-sizes, kind="stable").tolist():
        mine = some[group_of == one]
        if len(mine):
            groups.append(RankGroup(first, int(sizes[one]), tuple(sorted(mine.tolist()))))
            first += int(sizes[one])
    return tuple(groups)


@native("count", "ranks")
def _fit(
    lengths: Int64s,
    each: Float64s,
    smallest: Int64s,
    order: Int64s,
    degrees: Int64s,
    start: Float64s,
    count: int,
    ways: int,
    ranks: int,
    capacity: int,
    target: float,
    filling: int,
    tokens: OutInt64s,
    load: OutFloat64s,
    kind: OutInt64s,
    group_of: OutInt64s,
) -> int:
    """Return the number of groups that take all documents within the target, -1 where they do not. Writes the ``kind``
    (number of its degree) of each group, its ``tokens`` and ``load``, and the group of each document. ``filling`` 1:
    larger groups are filled before there is a new one."""
    made, left = 0, ranks
    for position in range(count):
        item = order[position]
        wanted, chosen = smallest[item], -1
        # the fullest group of its own degree that has room, then a new one or the fullest of larger ones
        for one in range(made):
            if kind[one] == wanted and tokens[one] + lengths[item] <= degrees[wanted] * capacity:
                if load[one] + each[item * ways + wanted] <= target and (chosen < 0 or load[one] > load[chosen]):
                    chosen = one
        for turn in range(2):
            if chosen < 0 and turn != filling and left >= degrees[wanted]:
                chosen = made
                kind[made] = wanted
                tokens[made] = 0
                load[made] = start[wanted]
                left -= degrees[wanted]
                made += 1
            if chosen < 0 and turn == filling:
                for one in range(made):
                    way = kind[one]
                    if way > wanted and tokens[one] + lengths[item] <= degrees[way] * capacity:
                        if load[one] + each[item * ways + way] <= target and (chosen < 0 or load[one] > load[chosen]):
                            chosen = one
        if chosen < 0:
            return -1
        group_of[item] = chosen
        tokens[chosen] += lengths[item]
        load[chosen] += each[item * ways + kind[chosen]]
    return made


def by_program(problem: GroupProblem, some: NDArray[np.int64]) -> Round:
    """Return the groups of the integer program, from those of :func:`by_time` on: how many groups there are of each
    degree, and how many documents of each length each of them takes."""
    first = by_time(problem, some)
    if not first:
        return first
    degrees, start, _, _ = problem.costs.arrays
    lengths, back, counts = np.unique(problem.lengths[some], return_inverse=True, return_counts=True)
    each = problem.costs.shares(lengths)
    if not problem.together:
        each = each + start * lengths[:, None] / (degrees * problem.capacity)
    slots = [k for k, d in enumerate(degrees.tolist()) for _ in range(problem.ranks // d)]
    kinds, count = len(lengths), len(slots)
    top, columns = (kinds + 1) * count, (kinds + 1) * count + 1  # n[length, slot], used[slot], seconds
    low, high, rows = np.zeros(columns), np.full(columns, np.inf), []
    for slot, k in enumerate(slots):
        column = range(slot, kinds * count, count)
        high[list(column)] = np.where(lengths <= degrees[k] * problem.capacity, counts, 0)
        used = kinds * count + slot
        high[used] = 1
        rows.append(LinearRow((*column, used, top), (*each[:, k], start[k], -1.0), high=0.0))
        room = degrees[k] * problem.capacity if problem.together else int(problem.lengths[some].sum())
        rows.append(LinearRow((*column, used), (*lengths.astype(float), -float(room)), high=0.0))
        if slot + 1 < count and slots[slot + 1] == k:
            rows.append(LinearRow((used, used + 1), (1.0, -1.0), low=0.0))  # of equal groups the first are used
    for i in range(kinds):
        rows.append(LinearRow(range(i * count, (i + 1) * count), np.ones(count), counts[i], counts[i]))
    every = range(kinds * count, top)
    rows.append(LinearRow(every, [float(degrees[k]) for k in slots], high=float(problem.ranks)))
    cost, whole = np.zeros(columns), np.arange(columns) < top
    cost[top] = 1.0
    found = minimise(cost, low, high, whole, rows, limit_s=LIMIT_S, gap=GAP)
    if found.x is None:
        return first
    taken = np.rint(found.x[: kinds * count]).astype(np.int64).reshape(kinds, count)
    group_of = np.zeros(len(some), np.int64)
    for i in range(kinds):
        group_of[np.flatnonzero(back == i)] = np.repeat(np.arange(count), taken[i])
    groups = _laid_out(degrees[slots], some, group_of)
    return min((groups, first), key=lambda one: slowest(problem, one))


def slowest(problem: GroupProblem, groups: Round) -> float:
    """Return the seconds of the slowest of some groups."""
    degrees, start, _, _ = problem.costs.arrays
    found = 0.0
    for _, size, documents in groups:
        k = int(np.searchsorted(degrees, size))
        found = max(found, float(start[k] + _work(problem, np.array(documents, np.int64))[:, k].sum()))
    return found


METHODS = (
    GroupMethod(
        name="flexsp",
        words="each document takes as many ranks as make the slowest group fastest",
        paper="Wang et al., 2024, 2412.01523",
        form=by_time,
        improve=improved,
    ),
    GroupMethod(
        name="flexsp-ilp",
        words="as flexsp, by the integer program of its paper",
        paper="Wang et al., 2024, 2412.01523",
        form=by_program,
    ),
    GroupMethod(
        name="bytescale",
        words="each document takes as few ranks as hold it",
        paper="Ge et al., 2025, 2502.21231",
        form=by_memory,
    ),
)
