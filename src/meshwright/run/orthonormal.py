"""Orthonormal columns of many small matrices of torch, as PowerSGD has them made in every step.

A matrix of a few columns is too little work for an operator of torch, which takes microseconds to begin: matrices of
one shape are made orthonormal together, column by column, with columns that lie in memory as rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from meshwright.sync.codecs.powersgd import TINY


def all_orthonormal(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return matrices [times, rows, rank] with their columns made orthonormal in their order, by the modified
    Gram-Schmidt process of :func:`~meshwright.sync.codecs.powersgd.orthonormal`: each column, once it has length 1,
    leaves all that are behind it."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, one in enumerate(matrices):
        alike[tuple(one.shape[-2:])].append(place)
    found = list(matrices)
    for places in alike.values():
        columns = torch.cat([matrices[place] for place in places]).mT.contiguous()
        for i in range(columns.shape[1]):
            column = columns[:, i : i + 1]
            column /= torch.linalg.vector_norm(column, dim=-1, keepdim=True) + TINY
            behind = columns[:, i + 1 :]
            if behind.shape[1]:
                behind -= (behind @ column.mT) @ column
        for place, one in zip(places, columns.mT.split([matrices[place].shape[0] for place in places])):
            found[place] = one
    return found
