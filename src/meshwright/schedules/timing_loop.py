"""The native loop behind `timing.in_order_times`: one visit per action, ranks woken when what they wait for ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.native import Bytes, Float64s, Int32s, Int64s, OutFloat64s, OutInt32s, OutInt64s, native
from meshwright.schedules.actions import Actions, F, W


def run_in_order(
    actions: Actions, length: NDArray[np.float64], comm: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Start and end of every action and, per rank, the action it stopped at (its end when all ran). ``length`` is of
    every action, ``comm`` [num_stages - 1] the lag between a stage and the next."""
    n, num_ranks, size = len(actions), actions.num_ranks, actions.num_stages * actions.num_microbatches
    start, end, place = np.zeros(n), np.zeros(n), actions.rank_ptr[:-1].copy()
    _run(
        actions.rank_ptr,
        actions.kind,
        actions.stage,
        actions.microbatch,
        np.ascontiguousarray(length, np.float64),
        np.ascontiguousarray(comm, np.float64),
        actions.num_stages,
        actions.num_microbatches,
        num_ranks,
        n,
        np.full(2 * size, -1, np.int64),
        np.zeros(2 * size, np.int32),
        np.full(2 * size, -1, np.int32),
        np.zeros(num_ranks),
        np.arange(num_ranks - 1, -1, -1, dtype=np.int32),
        start,
        end,
        place,
    )
    return start, end, place


@native("n")
def _run(
    rank_ptr: Int64s,
    kind: Bytes,
    stage: Int32s,
    microbatch: Int32s,
    length: Float64s,
    comm: Float64s,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int,
    n: int,
    done: OutInt64s,
    made_on: OutInt32s,
    waiting: OutInt32s,
    free: OutFloat64s,
    ready: OutInt32s,
    start: OutFloat64s,
    end: OutFloat64s,
    place: OutInt64s,
) -> None:
    """Write ``start``, ``end`` [n] and ``place`` [ranks], which begins as where each rank does.

    A blocked rank is noted at the one forward or backward it waits for; each has at most one rank waiting, because only
    the next stage uses it. ``done``, ``made_on`` and ``waiting`` [2, stages, microbatches] are -1, 0 and -1 before;
    ``free`` [ranks] is 0, ``ready`` all ranks, last first.
    """
    whole = num_stages * num_microbatches
    num_ready = num_ranks
    while num_ready > 0:
        num_ready -= 1
        r = ready[num_ready]
        while place[r] < rank_ptr[r + 1]:
            j = place[r]
            k, s, i = kind[j], stage[j], microbatch[j]
            way = 0 if k == F else 1
            here = way * whole + s * num_microbatches + i
            begin = free[r]
            if k == W:
                if done[here] < 0:
                    break
            else:
                if way == 1 and done[here - whole] < 0:
                    break
                before = s - 1 if way == 0 else s + 1
                if 0 <= before < num_stages:
                    near = here - num_microbatches if way == 0 else here + num_microbatches
                    j_before = done[near]
                    if j_before < 0:
                        waiting[near] = r
                        break
                    arrival = end[j_before]
                    if made_on[near] != r:
                        arrival += comm[min(s, before)]
                    begin = max(begin, arrival)
            start[j] = begin
            end[j] = begin + length[j]
            free[r] = end[j]
            place[r] += 1
            if k != W:
                done[here] = j
                made_on[here] = r
                if waiting[here] >= 0:
                    ready[num_ready] = waiting[here]
                    num_ready += 1
                    waiting[here] = -1
