"""Schedules told as phases: on each rank, a pattern of actions repeated some number of times, then the next.

A pattern is words such as ``F0 F1 B1 W1``: a kind and which of the rank's stages, counted in the order a
microbatch passes them forward. ``BW0`` is the full backward, and ``W`` alone is the oldest weight gradient
still owed, of any stage. Microbatches are numbered by occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from meshwright.schedules.actions import BW, Actions, B, F, W

KINDS = {"F": F, "B": B, "W": W, "BW": BW}
ANY = 2
"""The chunk of a ``W`` that names none."""


@cache
def _codes(pattern: str) -> np.ndarray:
    """(kind, chunk) of each word, int [2, words]."""
    letters = [word.rstrip("01") for word in pattern.split()]
    chunks = [int(word[len(kind) :] or ANY) for word, kind in zip(pattern.split(), letters)]
    return np.array([[KINDS[kind] for kind in letters], chunks])


def unfold(phases: Sequence[tuple[int, str]]) -> np.ndarray:
    """(kind, chunk, microbatch) of one rank's actions, int [3, n]; a negative repetition counts as none."""
    kind, chunk = np.concatenate([np.tile(_codes(pattern), max(times, 0)) for times, pattern in phases], axis=1)
    microbatch = np.empty(len(kind), dtype=np.int64)
    # A full backward counts with the backwards to the inputs.
    way = 3 * np.where(kind == BW, B, kind) + chunk
    alike = np.argsort(way, kind="stable")
    count = np.bincount(way)
    microbatch[alike] = np.arange(len(way)) - np.repeat(np.cumsum(count) - count, count)
    owed = np.flatnonzero((kind == W) & (chunk == ANY))
    if len(owed):
        split = np.flatnonzero(kind == B)
        chunk[owed], microbatch[owed] = chunk[split], microbatch[split]
    return np.stack((kind, chunk, microbatch))


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
