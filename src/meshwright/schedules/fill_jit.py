"""Weight gradients into the waits of a fixed order of forwards and backwards: the compiled loop."""

from __future__ import annotations

import numpy as np
from numba import njit

from meshwright.schedules.actions import BW, B, F, W

SETTLED = 4
"""The kind of a B whose W is in the order already."""


@njit(cache=True)
def run_fill(rank_ptr, kind, stage, microbatch, num_stages, num_microbatches, most):
    """Kind, stage and microbatch of every action with a W for each B, int32 [3, n + number of B], and the new
    rank_ptr. Every F, B and W takes one slot, and ranks keep their order.

    A rank runs its oldest W whenever the next action would wait a slot or more, and before a forward that would
    make it hold more than ``most`` activations; those left over follow its last action.
    """
    num_ranks, n = len(rank_ptr) - 1, len(kind)
    splits = np.zeros(num_ranks, dtype=np.int64)
    for r in range(num_ranks):
        splits[r] = np.count_nonzero(kind[rank_ptr[r] : rank_ptr[r + 1]] == B)
    base = rank_ptr.copy()
    base[1:] += np.cumsum(splits)
    out = np.zeros((3, n + splits.sum()), dtype=np.int32)
    never = np.iinfo(np.int64).max
    end = np.full((2, num_stages, num_microbatches), never)
    waiting = np.full((2, num_stages, num_microbatches), -1, dtype=np.int32)
    place, put, clock = rank_ptr[:-1].copy(), base[:-1].copy(), np.zeros(num_ranks, dtype=np.int64)
    held, ran_w = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    owed = np.zeros((num_ranks, splits.max(), 2), dtype=np.int32)
    num_owed = np.zeros(num_ranks, dtype=np.int64)
    ready, num_ready = np.arange(num_ranks)[::-1].copy(), num_ranks
    while num_ready > 0:
        num_ready -= 1
        r = ready[num_ready]
        while True:
            over = place[r] == rank_ptr[r + 1]
            arrival, forced = clock[r], False
            if not over:
                j = place[r]
                k, s, i = kind[j], stage[j], microbatch[j]
                way, before = (0, s - 1) if k == F else (1, s + 1)
                if k != W and 0 <= before < num_stages:
                    arrival = end[way, before, i]
                    if arrival == never:
                        waiting[way, before, i] = r
                        break
                forced = k == F and held[r] >= most
            elif ran_w[r] == num_owed[r]:
                break
            while ran_w[r] < num_owed[r] and (over or forced or clock[r] + 1 <= arrival):
                out[0, put[r]] = W
                out[1:, put[r]] = owed[r, ran_w[r]]
                put[r] += 1
                ran_w[r] += 1
                clock[r] += 1
                held[r] -= 1
                forced = forced and held[r] >= most
            if over:
                break
            out[0, put[r]], out[1, put[r]], out[2, put[r]] = k, s, i
            put[r] += 1
            clock[r] = max(clock[r], arrival) + (2 if k == BW else 1)
            held[r] += 1 if k == F else (-1 if k in (BW, W) else 0)
            place[r] += 1
            if k == B:
                owed[r, num_owed[r], 0], owed[r, num_owed[r], 1] = s, i
                num_owed[r] += 1
            if k != W:
                end[way, s, i] = clock[r]
                if waiting[way, s, i] >= 0:
                    ready[num_ready] = waiting[way, s, i]
                    num_ready += 1
                    waiting[way, s, i] = -1
    return out, base
