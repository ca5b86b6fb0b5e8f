"""Weight gradients into the waits of a fixed order of forwards and backwards: the native loop."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.native import Int32s, Int64s, OutInt32s, OutInt64s, native
from meshwright.schedules.actions import BW, Actions, B, F, W

SETTLED = 4
"""The kind of a B whose W is in the order already."""
NEVER = 2**63 - 1


def run_fill(actions: Actions, kind: NDArray[np.integer], most: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Kind, stage and microbatch of every action with a W for each B, int32 [3, n + number of B], and the new
    rank_ptr. Every F, B and W takes one slot, and ranks keep their order; ``kind`` replaces that of the actions.

    A rank runs its oldest W whenever the next action would wait a slot or more, and before a forward that would
    make it hold more than ``most`` activations; those left over follow its last action.
    """
    rank_ptr, num_ranks = actions.rank_ptr, actions.num_ranks
    splits = np.array([np.count_nonzero(kind[a:b] == B) for a, b in pairwise(rank_ptr)], np.int64)
    base = rank_ptr.copy()
    base[1:] += np.cumsum(splits)
    out = np.zeros((3, len(kind) + int(splits.sum())), np.int32)
    size, owed = 2 * actions.num_stages * actions.num_microbatches, int(splits.max(initial=0))
    _run(
        rank_ptr,
        kind.astype(np.int32),
        actions.stage,
        actions.microbatch,
        actions.num_stages,
        actions.num_microbatches,
        num_ranks,
        out.shape[1],
        most,
        owed,
        np.full(size, NEVER),
        np.full(size, -1, np.int32),
        rank_ptr[:-1].copy(),
        base[:-1].copy(),
        np.zeros(3 * num_ranks, np.int64),
        np.zeros(2 * num_ranks * owed, np.int32),
        np.zeros(num_ranks, np.int64),
        np.arange(num_ranks)[::-1].copy(),
        out.ravel(),
    )
    return out, base


@native("n")
def _run(
    rank_ptr: Int64s,
    kind: Int32s,
    stage: Int32s,
    microbatch: Int32s,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int,
    n: int,
    most: int,
    most_owed: int,
    end: OutInt64s,
    waiting: OutInt32s,
    place: OutInt64s,
    put: OutInt64s,
    counts: OutInt64s,
    owed: OutInt32s,
    num_owed: OutInt64s,
    ready: OutInt64s,
    out: OutInt32s,
) -> None:
    """Write ``out`` [3, n]. ``end`` and ``waiting`` [2, stages, microbatches] are NEVER and -1 before, ``place`` and
    ``put`` where each rank's actions begin before and after, ``counts`` [3, ranks] (the clock, activations held, W run)
    and ``num_owed`` 0, ``ready`` all ranks, last first; ``owed`` [ranks, most_owed, 2] is room."""
    whole, held, ran_w = num_stages * num_microbatches, num_ranks, 2 * num_ranks
    num_ready = num_ranks
    while num_ready > 0:
        num_ready -= 1
        r = ready[num_ready]
        while True:
            over = place[r] == rank_ptr[r + 1]
            arrival, forced = counts[r], False
            k, s, i, here = W, 0, 0, 0
            if not over:
                j = place[r]
                k, s, i = kind[j], stage[j], microbatch[j]
                here = s * num_microbatches + i if k == F else whole + s * num_microbatches + i
                before = s - 1 if k == F else s + 1
                if k != W and 0 <= before < num_stages:
                    near = here - num_microbatches if k == F else here + num_microbatches
                    arrival = end[near]
                    if arrival == NEVER:
                        waiting[near] = r
                        break
                forced = k == F and counts[held + r] >= most
            elif counts[ran_w + r] == num_owed[r]:
                break
            while counts[ran_w + r] < num_owed[r] and (over or forced or counts[r] + 1 <= arrival):
                due = 2 * (r * most_owed + counts[ran_w + r])
                out[put[r]] = W
                out[n + put[r]] = owed[due]
                out[2 * n + put[r]] = owed[due + 1]
                put[r] += 1
                counts[ran_w + r] += 1
                counts[r] += 1
                counts[held + r] -= 1
                forced = forced and counts[held + r] >= most
            if over:
                break
            out[put[r]] = k
            out[n + put[r]] = s
            out[2 * n + put[r]] = i
            put[r] += 1
            counts[r] = max(counts[r], arrival) + (2 if k == BW else 1)
            if k == F:
                counts[held + r] += 1
            elif k in (BW, W):
                counts[held + r] -= 1
            place[r] += 1
            if k == B:
                due = 2 * (r * most_owed + num_owed[r])
                owed[due] = s
                owed[due + 1] = i
                num_owed[r] += 1
            if k != W:
                end[here] = counts[r]
                if waiting[here] >= 0:
                    ready[num_ready] = waiting[here]
                    num_ready += 1
                    waiting[here] = -1
