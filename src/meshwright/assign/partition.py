"""Layers onto stages, exactly: the contiguous partition whose slowest stage is fastest, by dynamic programming.

The classic linear partition problem, with what pipelines add: the embedding rides on the first stage and the head on
the last, stages may be on different devices, and each has a memory of its own (AMP, Li et al., 2022, 2210.07297,
and PipeDream, Narayanan et al., 2019, 1806.03377, choose stages by the same recurrence).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.native import Float64s, OutFloat64s, OutInt64s, native


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
    extra = np.zeros(num_stages)
    extra[0] += first[0] if len(first) else 0.0
    extra[-1] += last[-1] if len(last) else 0.0
    choice, best = np.zeros((num_stages, num_layers + 1), np.int64), np.full(2 * (num_layers + 1), np.inf)
    slowest = _fill(upto.ravel(), held, room, extra, num_stages, num_layers + 1, best, choice.ravel())
    if not np.isfinite(slowest):
        return None
    ends, end = [], num_layers
    for s in range(num_stages - 1, -1, -1):
        begin = int(choice[s, end])
        ends.append(end - begin)
        end = begin
    return tuple(reversed(ends))


@native("num_stages", "ends", "ends")
def _fill(
    upto: Float64s,
    held: Float64s,
    room: Float64s,
    extra: Float64s,
    num_stages: int,
    ends: int,
    best: OutFloat64s,
    choice: OutInt64s,
) -> float:
    """The slowest stage of the best partition. Writes ``choice`` [S, ends]: where each stage begins when it ends at a
    layer; ``best`` [2, ends] is infinite before."""
    best[0] = 0.0
    now, then = 0, ends
    for s in range(num_stages):
        for j in range(ends):
            best[then + j] = np.inf
        for j in range(s + 1, ends - (num_stages - 1 - s)):
            for i in range(s, j):
                if held[j] - held[i] <= room[s]:
                    slowest = max(best[now + i], upto[s * ends + j] - upto[s * ends + i] + extra[s])
                    if slowest < best[then + j]:
                        best[then + j] = slowest
                        choice[s * ends + j] = i
        now, then = then, now
    return best[now + ends - 1]
