"""First fit, the largest items first: few bins.

It takes at most 11/9 of the fewest bins and 6/9 more (Dosa, "The tight bound of first fit decreasing", 2007). The bound
is Martello and Toth's L2 ("Lower bounds and reduction procedures for the bin packing problem", 1990): items above half
a bin need one each, and what is too large to join them needs more.
"""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from meshwright.assign import Assigned, Method, Problem
from meshwright.native import Int64s, OutInt64s, native


def solve(problem: Problem) -> Assigned:
    """Return the bins of :data:`METHOD`; with a number of bins, items that none of them has room for have none."""
    sizes = np.ascontiguousarray(problem.sizes, np.int64)
    order = np.argsort(-sizes, kind="stable")
    leaves = 1 << max(0, (max(1, len(sizes)) - 1).bit_length())
    room, bin_of = np.full(2 * leaves, problem.capacity, np.int64), np.full(len(sizes), -1, np.int64)
    _first_fit(sizes, order.astype(np.int64), problem.num_bins or len(sizes), leaves, len(sizes), room, bin_of)
    used = int(bin_of.max(initial=-1)) + 1
    return Assigned(bin_of=bin_of, num_bins=used, value=used, bound=least_bins(sizes, problem.capacity))


def least_bins(sizes: NDArray[np.int64], capacity: int) -> int:
    """Return a number of bins that no packing needs fewer of: the largest L2 over all thresholds."""
    if not len(sizes):
        return 0
    length, count = np.unique(sizes, return_counts=True)
    upto = np.concatenate([[0], np.cumsum(count)])  # items up to each distinct size
    filled = np.concatenate([[0], np.cumsum(count * length)])
    half = int(np.searchsorted(length, capacity // 2, side="right"))  # distinct sizes of half a bin or less
    small = [0, *length[:half].tolist()]
    best = ceil(filled[-1] / capacity)
    for least in small:
        # items beyond `capacity - least` share with none of the small ones, those of `least` and more
        alone = int(np.searchsorted(length, capacity - least, side="right"))
        first = int(np.searchsorted(length, least, side="left"))
        apart, shared = upto[-1] - upto[alone], upto[alone] - upto[half]
        room = shared * capacity - (filled[alone] - filled[half])
        best = max(best, int(apart + shared + max(0, ceil((filled[half] - filled[first] - room) / capacity))))
    return best


@native("num_items", "leaves")
def _first_fit(
    sizes: Int64s, order: Int64s, most: int, leaves: int, num_items: int, room: OutInt64s, bin_of: OutInt64s
) -> None:
    """Write ``bin_of``; ``room`` [2 leaves] is a tree of the most room under each node, full of the capacity before."""
    for position in range(num_items):
        item = order[position]
        size = sizes[item]
        if room[1] < size:
            continue
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        if node - leaves >= most:
            continue
        bin_of[item] = node - leaves
        room[node] -= size
        node //= 2
        while node >= 1:
            room[node] = max(room[2 * node], room[2 * node + 1])
            node //= 2


METHOD = Method(
    name="first-fit",
    words="the largest first, each into the first bin that has room",
    solve=solve,
    spreads=False,
)
