"""The costliest items first, each onto the bin that costs least and has room: a given number of bins of equal cost.

Without capacities this is Graham's longest processing time ("Bounds on multiprocessing timing anomalies", 1969), whose
costliest bin is at most 4/3 of the best. The bound is the mean, or the costliest item where that is more.
"""

from __future__ import annotations

import heapq

import numpy as np

from meshwright.assign import Assigned, Method, Problem


def solve(problem: Problem) -> Assigned:
    """Return the bins of :data:`METHOD`; items that no bin has room for have none, and count for nothing.

    Raises:
        ValueError: without a number of bins.
    """
    if problem.num_bins < 1:
        raise ValueError("costs are spread over a number of bins")
    costs = problem.sizes.astype(float) if problem.costs is None else problem.costs
    room, load = [problem.capacity] * problem.num_bins, [0.0] * problem.num_bins
    bin_of = np.full(len(costs), -1, np.int64)
    lightest = [(0.0, i) for i in range(problem.num_bins)]
    sizes, each = problem.sizes.tolist(), costs.tolist()
    for item in np.lexsort((-problem.sizes, -costs)).tolist():
        full = []
        while lightest:
            _, chosen = lightest[0]
            if room[chosen] >= sizes[item]:
                bin_of[item] = chosen
                room[chosen] -= sizes[item]
                load[chosen] += each[item]
                heapq.heapreplace(lightest, (load[chosen], chosen))
                break
            full.append(heapq.heappop(lightest))
        for one in full:
            heapq.heappush(lightest, one)
    placed = costs[bin_of >= 0]
    bound = max(float(placed.sum()) / problem.num_bins, float(placed.max(initial=0.0)))
    return Assigned(bin_of=bin_of, num_bins=problem.num_bins, value=max(load), bound=bound)


METHOD = Method(
    name="heaviest-first",
    words="the costliest first, each onto the bin that costs least and has room",
    solve=solve,
)
