"""Edges of a graph and samples of random walks over them, sorted into the buckets of partitions.

Node v is row v // P of partition v % P.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.edge_files import Edges


class SortedEdges(NamedTuple):
    """Samples by bucket: those of bucket (i, j) are ``first[i * P + j]`` to the next one's; rows in partitions."""

    heads: NDArray[np.int64]
    tails: NDArray[np.int64]
    first: NDArray[np.int64]
    relations: NDArray[np.int64] | None = None

    def of(self, head: int, tail: int, partitions: int) -> Edges:
        """Rows of the heads and tails of one bucket, in their partitions."""
        at = head * partitions + tail
        mine = slice(int(self.first[at]), int(self.first[at + 1]))
        return Edges(self.heads[mine], self.tails[mine], None if self.relations is None else self.relations[mine])


def by_bucket(edges: Edges, partitions: int, most: int = 0) -> SortedEdges:
    """Return edges sorted into buckets, of each at most so many (0: all), in the order they have."""
    bucket = edges.heads % partitions * partitions + edges.tails % partitions
    order = np.argsort(bucket, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(bucket, minlength=partitions**2))])
    if most:
        place = np.arange(len(order)) - first[bucket[order]]
        order = order[place < most]
        first = np.concatenate([[0], np.cumsum(np.minimum(np.diff(first), most))])
    kinds = None if edges.relations is None else edges.relations[order]
    return SortedEdges(edges.heads[order] // partitions, edges.tails[order] // partitions, first, kinds)


class Walks:
    """Random walks over a graph whose edges go both ways, from edges drawn alike, and the pairs of near nodes on
    them."""

    def __init__(self, edges: Edges, nodes: int, walk: int, augment: int):
        self.walk, self.augment = walk, augment
        ends = np.concatenate([edges.heads, edges.tails]), np.concatenate([edges.tails, edges.heads])
        order = np.argsort(ends[0], kind="stable")
        self.heads, self.neighbours = ends[0][order], ends[1][order]
        self.first = np.concatenate([[0], np.cumsum(np.bincount(self.heads, minlength=nodes))])

    def pairs(self, count: int, random: np.random.Generator) -> Edges:
        """Return so many pairs or some more, walk by walk."""
        each = sum(min(self.augment, self.walk - at) for at in range(self.walk))
        walks = -(-count // each)
        chain = np.empty((walks, self.walk + 1), np.int64)
        start = random.integers(len(self.heads), size=walks)
        chain[:, 0], chain[:, 1] = self.heads[start], self.neighbours[start]
        for step in range(2, self.walk + 1):  # every node that is met has an edge: the one it was met by
            at = chain[:, step - 1]
            degree = self.first[at + 1] - self.first[at]
            chain[:, step] = self.neighbours[self.first[at] + random.integers(degree)]
        pairs = [
            (at, at + far) for at in range(self.walk) for far in range(1, self.augment + 1) if at + far <= self.walk
        ]
        near, other = (chain[:, [pair[i] for pair in pairs]].reshape(-1) for i in (0, 1))
        return Edges(near, other)
