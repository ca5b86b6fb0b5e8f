"""The costliest items first, each onto the bin that costs least and has room: a given number of bins of equal cost.

Without capacities this is Graham's longest processing time ("Bounds on multiprocessing timing anomalies", 1969), whose
costliest bin is at most 4/3 of the best. The bound is the mean, or the costliest item where that is more.
"""

from __future__ import annotations

import numpy as np

from meshwright.assign import Assigned, Method, Problem
from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, native


def solve(problem: Problem) -> Assigned:
    """Return the bins of :data:`METHOD`, the costliest bin first; items that no bin has room for have none, and count
    for nothing.

    Raises:
        ValueError: without a number of bins.
    """
    if problem.num_bins < 1:
        raise ValueError("costs are spread over a number of bins")
    bins, sizes = problem.num_bins, np.ascontiguousarray(problem.sizes, np.int64)
    costs = np.ascontiguousarray(sizes if problem.costs is None else problem.costs, np.float64)
    room, load = np.full(bins, problem.capacity, np.int64), np.zeros(bins)
    bin_of = np.full(len(costs), -1, np.int64)
    order = np.lexsort((-sizes, -costs)).astype(np.int64)
    _heaviest_first(sizes, costs, order, bins, len(costs), room, load, bin_of)
    place = np.empty(bins, np.int64)
    place[np.argsort(-load, kind="stable")] = np.arange(bins)
    placed = costs[bin_of >= 0]
    bound = max(float(placed.sum()) / bins, float(placed.max(initial=0.0)))
    return Assigned(
        bin_of=np.where(bin_of >= 0, place[bin_of], -1), num_bins=bins, value=float(load.max()), bound=bound
    )


@native("bins", "num_items")
def _heaviest_first(
    sizes: Int64s,
    costs: Float64s,
    order: Int64s,
    bins: int,
    num_items: int,
    room: OutInt64s,
    load: OutFloat64s,
    bin_of: OutInt64s,
) -> None:
    """Write ``bin_of`` and ``load``; ``room`` is the capacity before."""
    for position in range(num_items):
        item = order[position]
        chosen = -1
        for one in range(bins):
            if room[one] >= sizes[item] and (chosen < 0 or load[one] < load[chosen]):
                chosen = one
        if chosen >= 0:
            bin_of[item] = chosen
            room[chosen] -= sizes[item]
            load[chosen] += costs[item]


METHOD = Method(
    name="heaviest-first",
    words="the costliest first, each onto the bin that costs least and has room",
    solve=solve,
)
