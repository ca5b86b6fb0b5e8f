"""The costliest items first, each onto the bin that costs least with it and has room: a given number of bins of equal
cost.

Without capacities and with equal bins this is Graham's longest processing time ("Bounds on multiprocessing timing
anomalies", 1969), whose costliest bin is at most 4/3 of the best.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.assign import Assigned, Method, Problem, assigned
from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, native


def solve(problem: Problem) -> Assigned:
    """Return the bins of :data:`METHOD`, of equal ones the costliest first; items that no bin has room for have none,
    and count for nothing."""
    bins, sizes = problem.num_bins, np.ascontiguousarray(problem.sizes, np.int64)
    each, alike = problem.each, problem.costs is None or problem.costs.ndim == 1
    load, bin_of = problem.before, np.full(len(sizes), -1, np.int64)
    costs = each[:, 0] if alike else each.min(axis=1)
    order = np.lexsort((-sizes, -costs)).astype(np.int64)
    table = np.ascontiguousarray(costs) if alike else each.ravel()
    _heaviest_first(sizes, table, order, bins, len(sizes), 0 if alike else bins, problem.room, load, bin_of)
    found = assigned(problem, bin_of)
    if not problem.alike:
        return found
    place = np.empty(bins, np.int64)
    place[np.argsort(-load, kind="stable")] = np.arange(bins)
    return msgspec.structs.replace(found, bin_of=np.where(bin_of >= 0, place[bin_of], -1), value=float(load.max()))


@native("bins", "num_items")
def _heaviest_first(
    sizes: Int64s,
    costs: Float64s,
    order: Int64s,
    bins: int,
    num_items: int,
    width: int,
    room: OutInt64s,
    load: OutFloat64s,
    bin_of: OutInt64s,
) -> None:
    """Write ``bin_of`` and ``load``; ``room`` is the capacity before. ``costs`` [N], of equal bins (``width`` 0), or
    [N, width]."""
    for position in range(num_items):
        item = order[position]
        chosen = -1
        for one in range(bins):
            if room[one] >= sizes[item]:
                if chosen < 0:
                    chosen = one
                elif width == 0:
                    if load[one] < load[chosen]:
                        chosen = one
                elif load[one] + costs[item * width + one] < load[chosen] + costs[item * width + chosen]:
                    chosen = one
        if chosen >= 0:
            bin_of[item] = chosen
            room[chosen] -= sizes[item]
            load[chosen] += costs[item * width + chosen] if width else costs[item]


METHOD = Method(
    name="heaviest-first",
    words="the costliest first, each onto the bin that costs least and has room",
    solve=solve,
)
