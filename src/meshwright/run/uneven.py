"""Shards of unequal size: who holds which elements of a bucket, and its collectives.

Collectives carry as many elements for every rank, so that shards travel padded to the largest; a prediction prices them
so (``sync/fragments.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.run.collect import gather_async, reduce_scatter_async
from meshwright.run.mesh import AxisGroup
from meshwright.run.shards import Awaited


def cuts(total: int, weights: Sequence[int]) -> list[int]:
    """Where the shards of `total` elements begin and end, [ranks + 1], sizes as near to `weights` as whole ones are."""
    whole, at, out = sum(weights), 0, [0]
    for weight in weights:
        at += weight
        out.append(round(total * at / whole))
    return out


class UnevenShards:
    """Shards of a flat tensor of `total` elements over a group, of sizes as `weights`."""

    def __init__(self, total: int, weights: Sequence[int], group: AxisGroup):
        self.group, self.ends = group, cuts(total, weights)
        self.widths = [stop - start for start, stop in zip(self.ends, self.ends[1:])]
        self.widest = max(self.widths)

    @property
    def mine(self) -> tuple[int, int]:
        """The first element of this rank's shard, and the one after the last."""
        return self.ends[self.group.index], self.ends[self.group.index + 1]

    @property
    def carried(self) -> int:
        """Elements of a collective: as many as the largest shard has, for every rank."""
        return len(self.widths) * self.widest

    def reduce(self, out: torch.Tensor, whole: torch.Tensor) -> Awaited:
        """Start summing `whole` [total] over the group into each rank's `out` [its width]."""
        padded = whole.new_zeros(self.carried)
        for rank, (start, width) in enumerate(zip(self.ends, self.widths)):
            padded[rank * self.widest : rank * self.widest + width] = whole[start : start + width]
        found = whole.new_empty(self.widest)
        work = reduce_scatter_async(found, padded, self.group)
        return Awaited(work, lambda: out.copy_(found[: len(out)]))

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Awaited:
        """Start filling `whole` [total] with every rank's shard; this one's is `mine`."""
        padded = mine.new_zeros(self.widest)
        padded[: len(mine)] = mine
        every = mine.new_empty(self.carried)
        work = gather_async(every, padded, self.group)

        def spread() -> None:
            for rank, (start, width) in enumerate(zip(self.ends, self.widths)):
                whole[start : start + width] = every[rank * self.widest : rank * self.widest + width]

        return Awaited(work, spread)
