"""Waves: the sequences of a step that a pool works on at once, and what those of two pools share.

Microbatch m of all data-parallel replicas is wave m. Replica d takes, of the step's sequences in their order, those
from ``(m * dp + d) * mb`` on, so that pools of any replicas and microbatches agree where a sequence is, and a slow
start of one replica does not hold up the other pool.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.schedules.actions import BW, Actions, B, F


def shared(waves: tuple[int, int], counts: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Waves (of the first, of the second) that share sequences, and how many, in order; `waves` are the sequences of a
    wave of each and `counts` how many waves there are."""
    (first, second), (most, others) = waves, counts
    for m in range(most):
        for k in range(m * first // second, min(others, -(-(m + 1) * first // second))):
            sequences = min((m + 1) * first, (k + 1) * second) - max(m * first, k * second)
            if sequences > 0:
                yield m, k, sequences


def rows(replicas: int, microbatch: int, replica: int, number: int) -> range:
    """The sequences of the step that one replica's microbatch `number` is made of, of `microbatch` sequences each."""
    first = (number * replicas + replica) * microbatch
    return range(first, first + microbatch)


def ahead(source: Actions, target: Actions, waves: tuple[int, int]) -> int:
    """Microbatches that a source has to be further ahead with its forwards than its schedule is: before it waits for
    the gradients of a wave, the target has all that it takes before it gives them, and one wave more is on its way, as
    a stage of 1F1B is one microbatch ahead of the next."""
    needed = _needed(target, waves)
    for count in range(source.num_microbatches + 1):
        last = source.ahead(count)
        made = _forwards_before_backward(last, last.num_stages - 1)
        if np.all(made >= np.minimum(needed, source.num_microbatches)):
            return count
    return source.num_microbatches


def _needed(target: Actions, waves: tuple[int, int]) -> np.ndarray:
    """Waves of a source that it should have made before it asks for the gradients of each of them."""
    taken = _forwards_before_backward(target, 0)
    counts = -(-target.num_microbatches * waves[1] // waves[0]), target.num_microbatches
    out = np.zeros(counts[0], np.int64)
    for m, k, _ in shared(waves, counts):
        out[m] = max(out[m], -(-(int(taken[k]) * waves[1] + max(waves)) // waves[0]))
    return out


def _forwards_before_backward(actions: Actions, stage: int) -> np.ndarray:
    """Return [microbatches]: the forwards of a stage that its rank does before each microbatch's backward."""
    rank = actions.stage_ranks[stage][0]
    part = slice(actions.rank_ptr[rank], actions.rank_ptr[rank + 1])
    mine = actions.stage[part] == stage
    kind, microbatch = actions.kind[part][mine], actions.microbatch[part][mine]
    done = np.cumsum(kind == F)
    out = np.zeros(actions.num_microbatches, np.int64)
    backward = np.isin(kind, (B, BW))
    out[microbatch[backward]] = done[backward]
    return out
