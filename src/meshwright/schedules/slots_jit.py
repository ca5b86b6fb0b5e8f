"""Slot by slot: the order that arises when every forward and backward takes one slot and ranks choose greedily.

Chimera, BitPipe and Hanayo are drawn on such a grid. In each slot a free rank takes a backward that is ready,
else a forward that is ready; of several, the earliest microbatch of its direction, then the first direction,
then the earliest stage.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from meshwright.schedules.actions import BW, F


@njit(cache=True)
def _choose(rank, slot, route, count, most, done, first_last):
    """(way, direction, stage) for this rank in this slot, way -1 for nothing. ``count`` [2, directions, stages]."""
    num_directions, num_stages = route.shape
    best, chosen = np.iinfo(np.int64).max, (-1, 0, 0)
    for d in range(num_directions):
        for s in range(num_stages):
            if route[d, s] != rank:
                continue
            for way in range(2):
                i = count[way, d, s]
                if i == first_last[d]:
                    continue
                if way == 0 and (i - count[1, d, s] >= most[d, s] or (s > 0 and done[0, d, s - 1, i] > slot)):
                    continue
                if way == 1 and (done[0, d, s, i] > slot or (s + 1 < num_stages and done[1, d, s + 1, i] > slot)):
                    continue
                key = (((1 - way) * done.shape[3] + i) * num_directions + d) * num_stages + s
                if key < best:
                    best, chosen = key, (way, d, s)
    return chosen


@njit(cache=True)
def run_slots(route, most, per_direction, num_ranks):
    """(kind, direction, stage, index) of every action, int32 [4, ranks, n], and the number on each rank [ranks].

    ``route`` int64 [directions, stages]: the rank of each stage. ``most`` int64, the same shape: microbatches a
    stage may have in flight. ``per_direction`` int64 [directions]: microbatches each way; index counts them.
    """
    num_directions, num_stages = route.shape
    total = 2 * num_stages * per_direction.sum()
    never = np.iinfo(np.int64).max
    done = np.full((2, num_directions, num_stages, per_direction.max()), never)
    count = np.zeros((2, num_directions, num_stages), dtype=np.int64)
    rows = np.zeros((4, num_ranks, total), dtype=np.int32)
    length = np.zeros(num_ranks, dtype=np.int64)
    slot, ran = 0, 0
    while ran < total:
        for rank in range(num_ranks):
            way, d, s = _choose(rank, slot, route, count, most, done, per_direction)
            if way >= 0:
                i = count[way, d, s]
                rows[:, rank, length[rank]] = (F if way == 0 else BW, d, s, i)
                # Ends with the slot: no other rank sees it before the next one.
                done[way, d, s, i] = slot + 1
                count[way, d, s] += 1
                length[rank] += 1
                ran += 1
        slot += 1
    return rows, length
