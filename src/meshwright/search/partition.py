"""Layers onto stages, exactly: the contiguous partition whose slowest stage is fastest, by dynamic programming.

The classic linear partition problem, with what pipelines add: the embedding rides on the first stage and the head on
the last, stages may be on different devices, and each has a memory of its own (AMP, Li et al., 2022, 2210.07297,
and PipeDream, Narayanan et al., 2019, 1806.03377, choose stages by the same recurrence).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def partition(
    seconds: np.ndarray,
    *,
    first: Sequence[float] = (),
    last: Sequence[float] = (),
    num_bytes: np.ndarray | None = None,
    capacity_bytes: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """Layers per stage, at least one each, so that the slowest stage is as fast as it can be; None when no partition
    fits. Of equally fast ones, the first in which every stage ends as early as possible from the back.

    Args:
        seconds: [S, L] of layer l on stage s (unequal devices have unequal rows).
        first, last: seconds [S] of the embedding and the head on each stage; only the first's and the last's count.
        num_bytes: [L] that a layer holds; with `capacity_bytes` [S] of each stage.
    """
    num_stages, num_layers = seconds.shape
    if num_layers < num_stages:
        return None
    upto = np.concatenate([np.zeros((num_stages, 1)), np.cumsum(seconds, axis=1)], axis=1)
    held = np.concatenate([[0.0], np.cumsum(num_bytes)]) if num_bytes is not None else np.zeros(num_layers + 1)
    room = np.array(capacity_bytes, float) if len(capacity_bytes) else np.full(num_stages, np.inf)
    best = np.full(num_layers + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((num_stages, num_layers + 1), np.int64)
    nonempty = np.arange(num_layers + 1)[:, None] < np.arange(num_layers + 1)
    for s in range(num_stages):
        extra = (first[0] if s == 0 and len(first) else 0.0) + (last[-1] if s == num_stages - 1 and len(last) else 0.0)
        # slowest[i, j]: stages up to s hold the first j layers, stage s those from i on
        cost = upto[s][None, :] - upto[s][:, None] + extra
        fits = (held[None, :] - held[:, None] <= room[s]) & nonempty
        slowest = np.where(fits, np.maximum(best[:, None], cost), np.inf)
        choice[s] = slowest.argmin(axis=0)
        best = slowest.min(axis=0)
    if not np.isfinite(best[num_layers]):
        return None
    ends, end = [], num_layers
    for s in range(num_stages - 1, -1, -1):
        begin = int(choice[s, end])
        ends.append(end - begin)
        end = begin
    return tuple(reversed(ends))
