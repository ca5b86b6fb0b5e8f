"""Cuts of a graph: on how many other devices a vertex is needed whose neighbours are divided among them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def copies_at_random(degree: float, parts: int) -> float:
    """Return in how many other parts a vertex of so many neighbours has one, in the mean, where vertices are divided at
    random: each of the others has none of them with the probability (1 - 1 / parts) ** degree."""
    return (parts - 1) * (1.0 - (1.0 - 1.0 / parts) ** degree)


def blocks(vertices: int, parts: int) -> NDArray[np.int64]:
    """Return the part of every vertex where parts are as long as each other and numbered one after the other."""
    return np.arange(vertices, dtype=np.int64) * parts // vertices


def skew_of(heads: NDArray[np.int64], tails: NDArray[np.int64], part_of: NDArray[np.int64]) -> float:
    """Return the edges of the part that has most of them over the mean, each at both of its ends."""
    count = np.bincount(part_of[heads], minlength=part_of.max() + 1) + np.bincount(
        part_of[tails], minlength=part_of.max() + 1
    )
    return float(count.max() / count.mean())


def copies_of(heads: NDArray[np.int64], tails: NDArray[np.int64], part_of: NDArray[np.int64]) -> float:
    """Return in how many other parts a vertex has a neighbour, in the mean; edges are needed in both directions."""
    parts = int(part_of.max()) + 1
    both = np.concatenate([heads, tails]), np.concatenate([tails, heads])
    pairs = np.unique(both[0] * parts + part_of[both[1]])
    return float((pairs % parts != part_of[pairs // parts]).sum()) / len(part_of)
