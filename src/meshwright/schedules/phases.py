"""Schedules told as phases: on each rank, a pattern of actions repeated some number of times, then the next.

A pattern is words such as ``F0 F1 B1 W1``: a kind and which of the rank's stages, counted in the order a
microbatch passes them forward. ``BW0`` is the full backward, and ``W`` alone is the oldest weight gradient
still owed, of any stage. Microbatches are numbered by occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.schedules.actions import BW, Actions, B, F, W

KINDS = {"F": F, "B": B, "W": W, "BW": BW}
OWED = -1


def unfold(phases: Sequence[tuple[int, str]]) -> np.ndarray:
    """(kind, chunk, microbatch) of one rank's actions, int [3, n]; a negative repetition counts as none."""
    words = [word for times, pattern in phases for word in pattern.split() * max(times, 0)]
    codes = {word: _code(word) for word in set(words)}
    kind, chunk = np.array([codes[word] for word in words], dtype=np.int64).reshape(-1, 2).T
    microbatch = np.empty(len(words), dtype=np.int64)
    for way in ((F,), (B, BW), (W,)):
        for c in np.unique(chunk):
            mine = np.isin(kind, way) & (chunk == c)
            microbatch[mine] = np.arange(np.count_nonzero(mine))
    owed = (kind == W) & (chunk == OWED)
    if owed.any():
        split = np.flatnonzero(kind == B)
        chunk[owed], microbatch[owed] = chunk[split], microbatch[split]
    return np.stack((kind, chunk, microbatch))


def _code(word: str) -> tuple[int, int]:
    letters = word.rstrip("0123456789")
    return KINDS[letters], int(word[len(letters) :] or OWED)


def v_shaped(name: str, per_rank: Sequence[Sequence[tuple[int, str]]], num_microbatches: int) -> Actions:
    """Actions where rank r of p holds stages r and 2p - 1 - r; microbatches past the last are left out."""
    p = len(per_rank)
    rows = [unfold(phases) for phases in per_rank]
    rows = [row[:, row[2] < num_microbatches] for row in rows]
    return Actions.of(
        name,
        [row[0] for row in rows],
        [np.where(row[1] == 0, r, 2 * p - 1 - r) for r, row in enumerate(rows)],
        [row[2] for row in rows],
        num_stages=2 * p,
        num_microbatches=num_microbatches,
    )
