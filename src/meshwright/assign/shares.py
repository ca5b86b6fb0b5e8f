"""Batch shares, exactly: microbatches per kind of data-parallel slice so that the slowest slice is fastest.

A pipeline of a kind takes a start and a time per microbatch, both as priced; whole microbatches are assigned so that
all are assigned and the slowest pipeline ends first, by dynamic programming over the kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def apportion(
    each_s: Sequence[float], start_s: Sequence[float], members: Sequence[int], total: int, allowed: np.ndarray
) -> tuple[int, ...] | None:
    """Microbatches of every slice of each kind, so that ``members @ shares == total`` and the largest ``start_s +
    shares * each_s`` is least; None when the numbers do not add up. Of equally good ones, that which gives the last
    kinds least.

    Args:
        each_s, start_s, members: seconds per microbatch, seconds besides, and slices of each kind [K].
        total: microbatches of all slices.
        allowed: microbatches that a pipeline can run, ascending, at least 1.
    """
    best = np.full(total + 1, np.inf)  # best[n]: n microbatches on the kinds so far
    best[0] = 0.0
    choices = []
    for each, start, count in zip(each_s, start_s, members):
        after, choice = np.full(total + 1, np.inf), np.zeros(total + 1, np.int64)
        for share in allowed[allowed * count <= total].tolist():
            taken = share * count
            slowest = np.maximum(best[: total + 1 - taken], start + share * each)
            better = slowest < after[taken:]
            after[taken:][better] = slowest[better]
            choice[taken:][better] = share
        best = after
        choices.append(choice)
    if not np.isfinite(best[total]):
        return None
    out, left = [], total
    for count, choice in zip(reversed(members), reversed(choices)):
        out.append(int(choice[left]))
        left -= out[-1] * count
    return tuple(reversed(out))
