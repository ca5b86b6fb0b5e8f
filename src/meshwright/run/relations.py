"""Relations of a run: random inputs of a computation, the rows of its sparse ones, and the forward of all of it whole.

The whole forward is dense: a sparse relation is a tensor of zeros where it has no row, and what follows from it is zero
there again. It shares with the placed computation its inputs, einsums by named keys and the plain functions of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import prod

import numpy as np
import torch

from meshwright.layers.algebra import Placement
from meshwright.spec.computation import ADD, JOIN, OVER_A_KEY, Computation

Keys = Sequence[str]


class Relations:
    """The keys of the rows of sparse inputs, int64 [keys, rows] each, by name."""

    def __init__(self, lengths: Mapping[str, Sequence[int]], keys: Mapping[str, np.ndarray]):
        self.lengths, self.keys = dict(lengths), dict(keys)

    def rows(self, of: str, place: Placement, sizes: Sequence[int], at: Sequence[int]) -> np.ndarray:
        """Numbers of the rows that the rank at a coordinate has: cut along a key those of its range, or along the dim
        behind them those whose number is in its range."""
        keys = self.keys[of]
        columns = (*keys, np.arange(keys.shape[1]))
        here = np.ones(keys.shape[1], bool)
        for column, (low, high) in zip(
            columns, self.bounds((*self.lengths[of], keys.shape[1]), place, sizes, at), strict=True
        ):
            here &= (column >= low) & (column < high)
        return np.flatnonzero(here)

    @staticmethod
    def bounds(
        lengths: Sequence[int], place: Placement, sizes: Sequence[int], at: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Where a rank's part of every dim begins and ends, as ``numpy.array_split`` cuts."""
        found = [(0, length) for length in lengths]
        for p, size, mine in zip(place, sizes, at):
            if p >= 0:
                low, high = found[p]
                each, more = divmod(high - low, size)
                begin = low + mine * each + min(mine, more)
                found[p] = begin, begin + each + (mine < more)
        return found


def data(computation: Computation, seed: int) -> tuple[Relations, dict[str, torch.Tensor]]:
    """Random inputs in float64, dense, and the rows of sparse ones. What is trained is scaled by the root of its first
    key's length, so that sums over it stay near 1."""
    rng = np.random.default_rng(seed)
    keys, lengths, given = {}, {}, {}
    for tensor in computation.inputs:
        shape = tuple(computation.dims[key] for key in tensor.keys)
        values = _values(tensor.values, shape, rng)
        if tensor.trained and shape:
            values = values / shape[0] ** 0.5
        if tensor.rows_of:
            rows = np.sort(rng.choice(int(np.prod(shape)), computation.nonzeros[tensor.name], replace=False))
            keys[tensor.name] = np.stack(np.unravel_index(rows, shape)).astype(np.int64)
            lengths[tensor.name] = shape
            values = values * _mask(keys[tensor.name], shape)
        given[tensor.name] = torch.from_numpy(values)
    return Relations(lengths, keys), given


def _values(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "uniform":
        return 1.0 - rng.random(shape)  # above 0, which logarithms need
    if kind == "ones" or not shape:
        return np.ones(shape)
    hot = rng.integers(shape[-1], size=shape[:-1])
    return (hot[..., None] == np.arange(shape[-1])).astype(np.float64)


def _mask(keys: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    found = np.zeros(shape)
    found[tuple(keys)] = 1.0
    return found


def einsum(read: Sequence[Keys], keys: Keys, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Einsum by named keys; those of the result that nothing has are left out, a dim of 1 each. Of three operands and
    more the two that leave the fewest numbers are joined first: torch takes them from left to right."""
    read, operands = list(read), list(operands)
    lengths = {k: n for its, x in zip(read, operands) for k, n in zip(its, x.shape)}
    while len(read) > 2:
        left = {}
        for i, j in combinations(range(len(read)), 2):
            others = {k for at, its in enumerate(read) if at not in (i, j) for k in its}
            left[i, j] = [k for k in dict.fromkeys((*read[i], *read[j])) if k in keys or k in others]
        i, j = min(left, key=lambda pair: prod(lengths[k] for k in left[pair]))
        operands.append(_einsum((read[i], read[j]), left[i, j], (operands[i], operands[j])))
        read.append(left[i, j])
        for at in (j, i):
            del read[at], operands[at]
    there = [k for k in keys if k in lengths]
    return aligned(_einsum(read, there, operands), there, keys)


def _einsum(read: Sequence[Keys], keys: Keys, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    letters: dict[str, str] = {}
    for k in (k for its in read for k in its):
        letters.setdefault(k, chr(ord("a") + len(letters)))
    text = ",".join("".join(letters[k] for k in its) for its in read) + "->" + "".join(letters[k] for k in keys)
    return torch.einsum(text, *operands)


def aligned(x: torch.Tensor, its: Keys, keys: Keys) -> torch.Tensor:
    """A tensor with its keys in the order of `keys`, a dim of 1 for each that it has not."""
    x = x.permute([list(its).index(k) for k in keys if k in its])
    for at, k in enumerate(keys):
        if k not in its:
            x = x.unsqueeze(at)
    return x


def whole(
    computation: Computation,
    relations: Relations,
    given: Mapping[str, torch.Tensor],
    forms: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
) -> torch.Tensor:
    """The loss of the forward on whole, dense tensors, for torch to differentiate."""
    masks = {
        name: torch.from_numpy(_mask(keys, tuple(relations.lengths[name]))) for name, keys in relations.keys.items()
    }
    values = {name: tensor * masks[name] if name in masks else tensor for name, tensor in given.items()}
    for step in computation.steps:
        ins = [values[name] for name in step.inputs]
        mask = masks.get(computation.tensors[step.output].rows_of)
        if step.kind == JOIN:
            out = step.factors[0] * einsum(step.read, step.keys, ins)
        elif step.kind == ADD:
            out = sum(f * aligned(x, keys, step.keys) for f, x, keys in zip(step.factors, ins, step.read))
        elif step.kind in OVER_A_KEY:
            out = getattr(torch, step.kind)(ins[0], dim=step.keys.index(step.over))
        elif mask is None:
            out = forms[step.kind](ins[0])
        else:  # a function is of rows: where there is none, a 1 stands in, whose slope is not infinite
            out = torch.where(mask > 0, forms[step.kind](torch.where(mask > 0, ins[0], torch.ones_like(mask))), 0.0)
        values[step.output] = out if mask is None else out * mask
        if step.output == computation.loss:
            break
    return values[computation.loss]
