"""Clock: one schedule timed again and again under other times, its actions visited in an order found once."""

from __future__ import annotations

import numpy as np

from meshwright.native import Bytes, Float64s, Int64s, OutFloat64s, native
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.schedules.timing import in_order_times


class ScheduleClock:
    """The dependencies of a schedule's actions as arrays: for each, in an order in which they can be visited, what runs
    before it on its rank, and what it needs of the neighbouring stage (as ``schedules/timing.py`` defines it)."""

    def __init__(self, actions: Actions):
        start, _ = in_order_times(actions, 1.0, 1.0, 1.0)
        rank, n = actions.rank_of(), len(actions)
        stage, microbatch = actions.stage.astype(np.int64), actions.microbatch.astype(np.int64)
        kind = np.where(actions.kind == BW, B, actions.kind)
        at = np.full((2, actions.num_stages + 2, actions.num_microbatches), -1)
        passed = kind != W
        at[kind[passed], stage[passed] + 1, microbatch[passed]] = np.flatnonzero(passed)
        near = at[np.minimum(kind, B), np.where(kind == F, stage, stage + 2), microbatch]
        near[kind == W] = -1
        before = np.arange(n) - 1
        before[actions.rank_ptr[:-1]] = -1
        order = np.argsort(start, kind="stable")
        place = np.empty(n + 1, np.int64)
        place[order], place[-1] = np.arange(n), -1
        self._before, self._near = place[before[order]], place[near[order]]
        self._crosses = (rank[near[order]] != rank[order]).astype(np.uint8)
        second = np.array([ranks[-1] if len(ranks) > 1 else -1 for ranks in actions.stage_ranks])[stage] == rank
        self._which = ((4 * second + actions.kind) * actions.num_stages + stage)[order]
        self.stage_ranks = actions.stage_ranks

    def makespan(self, seconds: np.ndarray, send: float) -> float:
        """Seconds until the last action ends, from `seconds` [turns, 4, num_stages] of F, B, W and full backwards on
        the first rank of a stage and, in the second turn, on the second; and of a message between ranks."""
        n = len(self._which)
        return _makespan(self._before, self._near, self._crosses, self._which, seconds.ravel(), send, n, np.empty(n))


@native("n")
def _makespan(
    before: Int64s,
    near: Int64s,
    crosses: Bytes,
    which: Int64s,
    seconds: Float64s,
    send: float,
    n: int,
    end: OutFloat64s,
) -> float:
    """The latest end of n actions; ``end`` [n] is room to work in."""
    latest = 0.0
    for i in range(n):
        t = 0.0
        if before[i] >= 0:
            t = end[before[i]]
        if near[i] >= 0:
            arrival = end[near[i]]
            if crosses[i]:
                arrival += send
            t = max(t, arrival)
        end[i] = t + seconds[which[i]]
        latest = max(latest, end[i])
    return latest
