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
def _choose(held, slot, count, most, done, per_direction):
    """(way, direction, stage) for a rank that holds ``held`` [k, 2] (direction, stage), in this slot; way -1 for
    nothing. ``count`` int64 [2, directions, stages]: forwards and backwards begun."""
    num_directions, num_stages = most.shape
    best, chosen = np.iinfo(np.int64).max, (-1, 0, 0)
    for place in range(len(held)):
        d, s = held[place, 0], held[place, 1]
        f, b = count[0, d, s], count[1, d, s]
        if b < f and done[0, d, s, b] <= slot and (s + 1 == num_stages or done[1, d, s + 1, b] <= slot):
            way, i = 1, b
        elif f < per_direction[d] and f - b < most[d, s] and (s == 0 or done[0, d, s - 1, f] <= slot):
            way, i = 0, f
        else:
            continue
        key = (((1 - way) * done.shape[3] + i) * num_directions + d) * num_stages + s
        if key < best:
            best, chosen = key, (way, d, s)
    return chosen


@njit(cache=True)
def run_slots(route, most, per_direction, num_ranks):
    """(kind, direction, stage, index) of every action, int32 [4, n], and rank_ptr int64 [ranks + 1].

    ``route`` int64 [directions, stages]: the rank of each stage. ``most`` int64, the same shape: microbatches a
    stage may have in flight. ``per_direction`` int64 [directions]: microbatches each way; index counts them.
    """
    num_directions, num_stages = route.shape
    rank_ptr = np.zeros(num_ranks + 1, dtype=np.int64)
    for d in range(num_directions):
        for s in range(num_stages):
            rank_ptr[route[d, s] + 1 :] += 2 * per_direction[d]
    total = rank_ptr[num_ranks]
    place = rank_ptr[:-1].copy()
    done = np.full((2, num_directions, num_stages, per_direction.max()), np.iinfo(np.int64).max)
    count = np.zeros((2, num_directions, num_stages), dtype=np.int64)
    out = np.zeros((4, total), dtype=np.int32)
    held = [np.argwhere(route == rank) for rank in range(num_ranks)]
    slot, ran = 0, 0
    while ran < total:
        for rank in range(num_ranks):
            way, d, s = _choose(held[rank], slot, count, most, done, per_direction)
            if way >= 0:
                i, j = count[way, d, s], place[rank]
                out[0, j], out[1, j], out[2, j], out[3, j] = (F if way == 0 else BW), d, s, i
                # Ends with the slot: no other rank sees it before the next one.
                done[way, d, s, i] = slot + 1
                count[way, d, s] += 1
                place[rank] += 1
                ran += 1
        slot += 1
    return out, rank_ptr
