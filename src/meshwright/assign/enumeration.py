"""Every assignment, but for those that cannot be better than one that is known: exact where there are few items.

Items are assigned the costliest first, depth first; equal bins without an item are one. After so many steps the best so
far is taken, with the usual bound.
"""

from __future__ import annotations

import numpy as np

from meshwright.assign import Assigned, Method, Problem, assigned, least_load
from meshwright.assign.heaviest_first import solve as heaviest_first
from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, native

#: Placements of an item that are tried, a second or so.
MOST_STEPS = 20_000_000


def solve(problem: Problem) -> Assigned:
    """Return the best of all assignments of all items, proven so where there was time; one that leaves items out where
    none has room for all."""
    first = heaviest_first(problem)
    whole = bool((first.bin_of >= 0).all())
    bound = least_load(problem)
    if whole and first.value <= bound:
        return first
    count, bins, each = len(problem.sizes), problem.num_bins, problem.each
    order = np.lexsort((-problem.sizes, -each.min(axis=1)))
    left = np.concatenate([np.cumsum(each[order].min(axis=1)[::-1])[::-1], [0.0]])
    best = first.bin_of[order].copy() if whole else np.full(count, -1, np.int64)
    value = np.array([first.value if whole else np.inf])
    steps = _enumerate(
        np.ascontiguousarray(problem.sizes[order], np.int64),
        each[order].ravel(),
        left,
        bins,
        count,
        int(problem.alike),
        bound,
        MOST_STEPS,
        problem.room,
        problem.before,
        np.full(count, -1, np.int64),
        value,
        best,
    )
    if not np.isfinite(value[0]):
        return first
    bin_of = np.empty(count, np.int64)
    bin_of[order] = best
    return assigned(problem, bin_of, float(value[0]) if steps < MOST_STEPS else bound)


@native("num_items", "num_items", "bins", "bins")
def _enumerate(
    sizes: Int64s,
    costs: Float64s,
    left: Float64s,
    bins: int,
    num_items: int,
    alike: int,
    bound: float,
    most: int,
    room: OutInt64s,
    load: OutFloat64s,
    at: OutInt64s,
    value: OutFloat64s,
    best: OutInt64s,
) -> int:
    """Return the steps taken; write ``value`` [1] and ``best`` [N] where something better was found. ``at`` [N] is the
    bin of each item so far, ``left`` [N + 1] what the items from one on cost where they cost least."""
    item, steps = 0, 0
    while item >= 0 and steps < most and value[0] > bound * (1.0 + 1e-12):
        if item == num_items:
            worst = 0.0
            for one in range(bins):
                if load[one] > worst:
                    worst = load[one]
            if worst < value[0]:
                value[0] = worst
                for i in range(num_items):
                    best[i] = at[i]
            item -= 1
            continue
        steps += 1
        here = at[item]
        fresh = 0
        if here >= 0:
            load[here] -= costs[item * bins + here]
            room[here] += sizes[item]
        total = left[item]
        for one in range(bins):
            total += load[one]
        next_ = here + 1
        if total / bins >= value[0]:
            next_ = bins
        while next_ < bins:
            if alike == 1:
                fresh = 0
                for i in range(item):
                    if at[i] == next_:
                        fresh = 1
                        break
                if fresh == 0 and next_ > 0:  # the bin before this is empty as well: the same again
                    used = 0
                    for i in range(item):
                        if at[i] == next_ - 1:
                            used = 1
                            break
                    if used == 0:
                        next_ = bins
                        break
            if room[next_] >= sizes[item] and load[next_] + costs[item * bins + next_] < value[0]:
                break
            next_ += 1
        if next_ >= bins:
            at[item] = -1
            item -= 1
            continue
        at[item] = next_
        load[next_] += costs[item * bins + next_]
        room[next_] -= sizes[item]
        item += 1
    return steps


METHOD = Method(name="enumerate", words="every assignment, but for those that cannot be better", solve=solve)
