"""The assignment as an integer program: a bin is chosen for every item, and the costliest bin made to cost least."""

from __future__ import annotations

import numpy as np

from meshwright.assign import Assigned, Method, Problem, assigned
from meshwright.assign.local_search import solve as local_search
from meshwright.assign.program import LinearRow, minimise

#: Seconds that the solver has.
LIMIT_S = 10.0


def solve(problem: Problem, *, limit_s: float = LIMIT_S, nodes: int = 0) -> Assigned:
    """Return the best that the solver found in `limit_s`, or in `nodes` of its search where they are more than 0, with
    its bound; items have none where no assignment has room for all."""
    count, bins, each, room = len(problem.sizes), problem.num_bins, problem.each, problem.room
    first = local_search(problem)
    if not count or first.value <= first.bound:
        return first
    columns = count * bins + 1  # x[item, bin], and the cost of the costliest
    top = columns - 1
    rows = [LinearRow(range(i * bins, (i + 1) * bins), np.ones(bins), 1.0, 1.0) for i in range(count)]
    for one in range(bins):
        of_bin = range(one, count * bins, bins)
        rows.append(LinearRow((*of_bin, top), (*each[:, one], -1.0), high=-float(problem.before[one])))
        if problem.sizes.sum() > room[one]:
            rows.append(LinearRow(of_bin, problem.sizes.astype(float), high=float(room[one])))
    low, high = np.zeros(columns), np.ones(columns)
    if problem.alike:  # of equal bins, item i goes to one of the first i + 1
        order = np.argsort(-each[:, 0], kind="stable")
        for place, item in enumerate(order[:bins].tolist()):
            high[item * bins + place + 1 : (item + 1) * bins] = 0.0
    whole = np.arange(columns) < top
    low[top], high[top] = first.bound if (first.bin_of >= 0).all() else 0.0, np.inf
    cost = np.zeros(columns)
    cost[top] = 1.0
    found = minimise(cost, low, high, whole, rows, limit_s=limit_s, nodes=nodes)
    if found.x is None:
        return first if np.isfinite(found.bound) else assigned(problem, np.full(count, -1, np.int64))
    bin_of = found.x[:-1].reshape(count, bins).argmax(axis=1).astype(np.int64)
    best = assigned(problem, bin_of, found.bound)
    kept = (first.bin_of >= 0).all() and first.value < best.value
    return assigned(problem, first.bin_of, found.bound) if kept else best


METHOD = Method(
    name="ilp", words="an integer program: the best there is, or how near the solver came to it", solve=solve
)
