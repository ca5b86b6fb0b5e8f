"""Moves and swaps of items between bins while the costliest becomes less costly, from the costliest items first.

Each turn takes the costliest bin and looks for the move of one of its items, or its swap with one of another bin, that
leaves the costlier of both least (the neighbourhood of Finn and Horowitz, "A linear time approximation algorithm for
multiprocessor scheduling", 1979, with swaps). Items that had no room are put where a move has made some.
"""

from __future__ import annotations

import numpy as np

from meshwright.assign import Assigned, Method, Problem, assigned
from meshwright.assign.heaviest_first import solve as heaviest_first
from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, native

#: Turns that are taken at most, for each item.
TURNS = 20


def solve(problem: Problem) -> Assigned:
    """Return an assignment that no move and no swap makes better."""
    found = heaviest_first(problem)
    bin_of = np.ascontiguousarray(found.bin_of, np.int64)
    has = bin_of >= 0
    each, load, room = problem.each, problem.before, problem.room
    np.add.at(load, bin_of[has], each[has, bin_of[has]])
    np.subtract.at(room, bin_of[has], problem.sizes[has])
    sizes = np.ascontiguousarray(problem.sizes, np.int64)
    _improve(sizes, each.ravel(), problem.num_bins, len(sizes), TURNS * len(sizes), room, load, bin_of)
    return assigned(problem, bin_of, found.bound if has.all() else 0.0)


@native("num_items", "num_items")
def _improve(
    sizes: Int64s,
    costs: Float64s,
    bins: int,
    num_items: int,
    turns: int,
    room: OutInt64s,
    load: OutFloat64s,
    bin_of: OutInt64s,
) -> None:
    """Change ``bin_of`` [N], ``load`` and ``room`` [bins]."""
    for _ in range(turns):
        worst = 0
        for one in range(bins):
            if load[one] > load[worst]:
                worst = one
        least, item, other, target = load[worst] * (1.0 - 1e-12), -1, -1, -1
        for i in range(num_items):
            if bin_of[i] != worst:
                continue
            without = load[worst] - costs[i * bins + worst]
            for one in range(bins):
                if one == worst or room[one] < sizes[i]:
                    continue
                high = load[one] + costs[i * bins + one]
                if without > high:
                    high = without
                if high < least:
                    least, item, other, target = high, i, -1, one
            for j in range(num_items):
                one = bin_of[j]
                if one < 0 or one == worst:
                    continue
                if room[one] + sizes[j] < sizes[i] or room[worst] + sizes[i] < sizes[j]:
                    continue
                high = load[one] - costs[j * bins + one] + costs[i * bins + one]
                mine = without + costs[j * bins + worst]
                if mine > high:
                    high = mine
                if high < least:
                    least, item, other, target = high, i, j, one
        if item < 0:
            return
        load[worst] -= costs[item * bins + worst]
        room[worst] += sizes[item]
        load[target] += costs[item * bins + target]
        room[target] -= sizes[item]
        bin_of[item] = target
        if other >= 0:
            load[target] -= costs[other * bins + target]
            room[target] += sizes[other]
            load[worst] += costs[other * bins + worst]
            room[worst] -= sizes[other]
            bin_of[other] = worst
        for i in range(num_items):
            if bin_of[i] < 0:
                for one in range(bins):
                    if room[one] >= sizes[i] and bin_of[i] < 0:
                        bin_of[i] = one
                        room[one] -= sizes[i]
                        load[one] += costs[i * bins + one]


METHOD = Method(
    name="local-search",
    words="the costliest first, then moves and swaps out of the costliest bin while it becomes less costly",
    solve=solve,
)
