"""Schedules drawn on a grid of equal slots, for pipelines that cross a rank more than once (see `slots_loop`)."""

from __future__ import annotations

import numpy as np

from meshwright.schedules.actions import Actions


def wave(num_ranks: int, passes: int) -> np.ndarray:
    """The rank of each stage when a microbatch goes down the ranks, back up, down again: int64 [p passes]."""
    down = np.arange(num_ranks)
    return np.concatenate([down if k % 2 == 0 else down[::-1] for k in range(passes)])


def both_ways(num_microbatches: int, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """The microbatches that go down and those that go up: of each unit the first half down, the rest up."""
    item = np.arange(num_microbatches)
    start = item // unit * unit
    size = np.minimum(unit, num_microbatches - start)
    down = 2 * (item - start) < size
    return item[down], item[~down]


def actions_of(name: str, route: np.ndarray, most: np.ndarray, microbatches: tuple[np.ndarray, ...]) -> Actions:
    """The greedy order. ``route`` and ``most`` int64 [directions, stages]: each stage's rank and the microbatches
    it may have in flight; ``microbatches``: those that go each way."""
    from meshwright.schedules.slots_loop import run_slots

    num_ranks = int(route.max()) + 1
    counts = np.array([len(way) for way in microbatches], dtype=np.int64)
    (kind, way, stage, index), rank_ptr = run_slots(route.astype(np.int64), most.astype(np.int64), counts, num_ranks)
    start = np.concatenate(([0], np.cumsum(counts)[:-1]))
    microbatch = np.concatenate(microbatches)[start[way] + index]
    return Actions.of(
        name,
        *(np.split(column, rank_ptr[1:-1]) for column in (kind, stage, microbatch)),
        num_stages=route.shape[1],
        num_microbatches=int(counts.sum()),
    )
