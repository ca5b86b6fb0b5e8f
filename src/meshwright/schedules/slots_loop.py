"""Slot by slot: the order that arises when every forward and backward takes one slot and ranks choose greedily.

Chimera, BitPipe and Hanayo are drawn on such a grid. In each slot a free rank takes a backward that is ready,
else a forward that is ready; of several, the earliest microbatch of its direction, then the first direction,
then the earliest stage.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.native import Int64s, OutInt32s, OutInt64s, native
from meshwright.schedules.actions import BW, F

NEVER = 2**63 - 1


def run_slots(
    route: NDArray[np.int64], most: NDArray[np.int64], per_direction: NDArray[np.int64], num_ranks: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """(kind, direction, stage, index) of every action, int32 [4, n], and rank_ptr int64 [ranks + 1].

    ``route`` int64 [directions, stages]: the rank of each stage. ``most`` int64, the same shape: microbatches a
    stage may have in flight. ``per_direction`` int64 [directions]: microbatches each way; index counts them.
    """
    num_directions, num_stages = route.shape
    on_rank = [np.argwhere(route == rank) for rank in range(num_ranks)]
    held_ptr = np.cumsum([0, *map(len, on_rank)])
    sizes = [2 * int(per_direction[where[:, 0]].sum()) for where in on_rank]
    rank_ptr = np.cumsum([0, *sizes]).astype(np.int64)
    total, deep = int(rank_ptr[-1]), int(per_direction.max())
    out = np.zeros((4, total), np.int32)
    _run(
        held_ptr,
        np.concatenate(on_rank).ravel(),
        most.ravel(),
        per_direction,
        num_directions,
        num_stages,
        num_ranks,
        deep,
        total,
        rank_ptr[:-1].copy(),
        np.full(2 * route.size * deep, NEVER),
        np.zeros(2 * route.size, np.int64),
        out.ravel(),
    )
    return out, rank_ptr


@native("total")
def _run(
    held_ptr: Int64s,
    held: Int64s,
    most: Int64s,
    per_direction: Int64s,
    num_directions: int,
    num_stages: int,
    num_ranks: int,
    deep: int,
    total: int,
    place: OutInt64s,
    done: OutInt64s,
    count: OutInt64s,
    out: OutInt32s,
) -> None:
    """Write ``out`` [4, total]. ``held``: direction and stage of what each rank holds, at ``held_ptr``; ``place``
    begins as where each rank's actions do; ``done`` [2, directions, stages, deep] is NEVER before and ``count``
    [2, directions, stages], forwards and backwards begun, 0."""
    cells = num_directions * num_stages
    slot, ran = 0, 0
    while ran < total:
        for rank in range(num_ranks):
            best, way, d, s = NEVER, -1, 0, 0
            for k in range(held_ptr[rank], held_ptr[rank + 1]):
                to, at = held[2 * k], held[2 * k + 1]
                cell = to * num_stages + at
                f, b = count[cell], count[cells + cell]
                if (
                    b < f
                    and done[cell * deep + b] <= slot
                    and (at + 1 == num_stages or done[(cells + cell + 1) * deep + b] <= slot)
                ):
                    now, i = 1, b
                elif f < per_direction[to] and f - b < most[cell] and (at == 0 or done[(cell - 1) * deep + f] <= slot):
                    now, i = 0, f
                else:
                    continue
                key = (((1 - now) * deep + i) * num_directions + to) * num_stages + at
                if key < best:
                    best, way, d, s = key, now, to, at
            if way >= 0:
                cell = way * cells + d * num_stages + s
                i, j = count[cell], place[rank]
                out[j] = F if way == 0 else BW
                out[total + j] = d
                out[2 * total + j] = s
                out[3 * total + j] = i
                # Ends with the slot: no other rank sees it before the next one.
                done[cell * deep + i] = slot + 1
                count[cell] += 1
                place[rank] += 1
                ran += 1
        slot += 1
