"""Pruning of a model that clients train: a mask of its matrices, cut further round after round, and a penalty that
grows alongside (FedDIP, Long et al. 2309.06805).

After every so many rounds the server keeps the values of largest magnitude among all matrices, fewer each time. What
goes to a client is the values that are kept, and the mask, a bit for each value of a matrix, if it has another.
"""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

#: Steps in which the penalty grows, the first of none, and the first that is not none: its authors'.
SEGMENTS, LEAST = 20, 5e-4


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """A mask that is cut at the end of every ``every`` rounds, from a share ``first`` of zeros to ``last`` after so
    many ``rounds``, and the largest ``penalty`` on the length of each matrix."""

    rounds: int
    first: float
    last: float
    every: int
    penalty: float

    def sparsity(self, number: int) -> float:
        """Return the share of zeros in the mask that is cut at the end of a round, counted from 0."""
        left = 1 - min(number, self.rounds) / self.rounds
        return self.last + (self.first - self.last) * left**3

    def mask_of(self, number: int) -> int:
        """Return the round at whose end the mask was cut that a round's model has; -1 before there is one."""
        return (number - 1) // self.every * self.every if number else -1

    def kept(self, mask: int, prunable: int) -> int:
        """Return how many of so many values a mask keeps; of none, all."""
        return prunable if mask < 0 else prunable - round(self.sparsity(mask) * prunable)

    def strength(self, number: int) -> float:
        """Return the penalty of a round."""
        segment = min(SEGMENTS - 1, number * SEGMENTS // self.rounds)
        step = (self.penalty - LEAST) / (SEGMENTS - 1)
        return LEAST + step * (segment - 1) if segment and self.penalty else 0.0

    def sent(self, mask: int, told: bool, prunable: int, others: int, element_bytes: int) -> int:
        """Return the bytes of a model to a client, which is ``told`` the mask or has it."""
        bits = -(-prunable // 8) if told and mask >= 0 else 0
        return (others + self.kept(mask, prunable)) * element_bytes + bits


def densities(shapes: list[tuple[int, ...]], density: float) -> list[float]:
    """Return the part of each matrix that is kept, so that a share `density` of all is: in proportion to the sum of its
    sides over their product, at most all of it (Erdos-Renyi, Mocanu et al. 1707.04780; Evci et al. 1911.11134)."""
    sizes = [prod(shape) for shape in shapes]
    likely = [sum(shape) / size for shape, size in zip(shapes, sizes)]
    full: set[int] = set()
    while True:
        kept = density * sum(sizes) - sum(sizes[i] for i in full)
        spread = sum(likely[i] * sizes[i] for i in range(len(sizes)) if i not in full)
        scale = kept / spread if spread else 0.0
        over = {i for i in range(len(sizes)) if i not in full and likely[i] * scale > 1}
        if not over:
            return [1.0 if i in full else likely[i] * scale for i in range(len(sizes))]
        full |= {max(over, key=likely.__getitem__)}


def drawn(shapes: list[tuple[int, ...]], density: float, seed: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a mask of all matrices, one behind the other, drawn with these densities."""
    rng, out = np.random.default_rng(seed), []
    for shape, part in zip(shapes, densities(shapes, density)):
        size = prod(shape)
        mask = np.zeros(size, bool)
        mask[rng.permutation(size)[: int(part * size)]] = True
        out.append(mask)
    return np.concatenate(out)
