"""The compiled loop behind `timing.in_order_times`: one visit per action, ranks woken when what they wait for ends."""

from __future__ import annotations

import numpy as np
from numba import njit

from meshwright.schedules.actions import F, W


@njit(cache=True)
def run_in_order(rank_ptr, kind, stage, microbatch, length, comm, num_stages, num_microbatches):
    """Start and end of every action and, per rank, the action it stopped at (its end when all ran).

    A blocked rank is noted at the one forward or backward it waits for; each has at most one rank waiting,
    because only the next stage uses it.
    """
    num_ranks, n = len(rank_ptr) - 1, len(kind)
    start, end = np.zeros(n), np.zeros(n)
    done = np.full((2, num_stages, num_microbatches), -1, dtype=np.int64)
    made_on = np.zeros((2, num_stages, num_microbatches), dtype=np.int32)
    waiting = np.full((2, num_stages, num_microbatches), -1, dtype=np.int32)
    place = rank_ptr[:-1].copy()
    free = np.zeros(num_ranks)
    ready = np.arange(num_ranks - 1, -1, -1).astype(np.int32)
    num_ready = num_ranks
    while num_ready > 0:
        num_ready -= 1
        r = ready[num_ready]
        while place[r] < rank_ptr[r + 1]:
            j = place[r]
            k, s, i = kind[j], stage[j], microbatch[j]
            way = 0 if k == F else 1
            begin = free[r]
            if k == W:
                if done[1, s, i] < 0:
                    break
            else:
                if way == 1 and done[0, s, i] < 0:
                    break
                before = s - 1 if way == 0 else s + 1
                if 0 <= before < num_stages:
                    j_before = done[way, before, i]
                    if j_before < 0:
                        waiting[way, before, i] = r
                        break
                    arrival = end[j_before]
                    if made_on[way, before, i] != r:
                        arrival += comm[min(s, before)]
                    begin = max(begin, arrival)
            start[j] = begin
            end[j] = begin + length[j]
            free[r] = end[j]
            place[r] += 1
            if k != W:
                done[way, s, i] = j
                made_on[way, s, i] = r
                if waiting[way, s, i] >= 0:
                    ready[num_ready] = waiting[way, s, i]
                    num_ready += 1
                    waiting[way, s, i] = -1
    return start, end, place
