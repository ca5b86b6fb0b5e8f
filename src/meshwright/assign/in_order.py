"""Consecutive items onto consecutive bins, by dynamic programming: the best of all assignments that keep the order.

What a bin before another has comes before what that has, as layers lie on stages, or sequences in the order of their
lengths in buckets; the recurrence is that of :mod:`.partition`, with bins that may stay empty.
"""

from __future__ import annotations

import numpy as np

from meshwright.assign import Assigned, Method, Problem, assigned
from meshwright.native import Float64s, Int64s, OutFloat64s, OutInt64s, native


def solve(problem: Problem) -> Assigned:
    """Return the bins of :data:`METHOD`; all items have none where no order of them fits."""
    count, bins = len(problem.sizes), problem.num_bins
    upto = np.concatenate([np.zeros((1, bins)), np.cumsum(problem.each, axis=0)])
    held = np.concatenate([[0], np.cumsum(problem.sizes)]).astype(np.int64)
    best, choice = np.full(2 * (count + 1), np.inf), np.zeros(bins * (count + 1), np.int64)
    value = _fill(upto.T.ravel(), held, problem.room, problem.before, bins, count + 1, best, choice)
    bin_of, end = np.full(count, -1, np.int64), count
    if np.isfinite(value):
        for one in range(bins - 1, -1, -1):
            begin = int(choice[one * (count + 1) + end])
            bin_of[begin:end] = one
            end = begin
    return assigned(problem, bin_of)


@native("bins", "ends", "ends")
def _fill(
    upto: Float64s,
    held: Int64s,
    room: Int64s,
    start: Float64s,
    bins: int,
    ends: int,
    best: OutFloat64s,
    choice: OutInt64s,
) -> float:
    """The costliest bin of the best assignment. Writes ``choice`` [bins, ends]: the first item of each bin when it ends
    before an item; ``best`` [2, ends] is infinite before, ``upto`` [bins, ends] what the items before cost there."""
    best[0] = 0.0
    now, then = 0, ends
    for one in range(bins):
        for end in range(ends):
            best[then + end] = best[now + end] if best[now + end] > start[one] else start[one]
            choice[one * ends + end] = end
            for begin in range(end - 1, -1, -1):
                if held[end] - held[begin] > room[one]:
                    break
                cost = upto[one * ends + end] - upto[one * ends + begin] + start[one]
                if best[now + begin] > cost:
                    cost = best[now + begin]
                if cost < best[then + end]:
                    best[then + end] = cost
                    choice[one * ends + end] = begin
        now, then = then, now
    return best[now + ends - 1]


METHOD = Method(
    name="in-order",
    words="consecutive items onto consecutive bins, the best that keeps the order, by dynamic programming",
    solve=solve,
)
