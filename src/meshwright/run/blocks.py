"""The geometry of checkpoints: positions in the published tensors of the elements of a flat run of a local tensor.

A run [start, stop) of a flattened tensor of n dimensions is at most 2n - 1 boxes; a box inside a part of a parameter is
a box of a published tensor. Two processes' runs, cut in whatever ways, meet where their boxes meet, and each side's
elements there are one strided view of its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from meshwright.run.pieces import Parameter, Part


class TensorBox(NamedTuple):
    """A box of the tensor ``name``, whose whole has ``shape``: it begins at ``low`` and has ``size``. Its first
    element is at ``start`` of the run's values, the others follow by ``strides``."""

    name: str
    shape: tuple[int, ...]
    low: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    def view(self, values: torch.Tensor, low: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """The elements of the box `low`, `size` (inside this block) of a run's 1-D `values`; shares its storage."""
        step = values.stride(0)
        at = self.start + sum((a - b) * s for a, b, s in zip(low, self.low, self.strides, strict=True))
        return values.as_strided(tuple(size), [s * step for s in self.strides], values.storage_offset() + at * step)


def whole(name: str, shape: Sequence[int]) -> TensorBox:
    """The block that is all of a tensor, its values in row order."""
    shape = tuple(shape)
    return TensorBox(name, shape, (0,) * len(shape), shape, 0, _strides(shape))


def blocks(parameter: Parameter, start: int, stop: int) -> list[TensorBox]:
    """Return the blocks of published tensors that elements [start, stop) of the flattened local tensor stand for.
    Elements outside every part (padding) stand for nothing."""
    shape = tuple(parameter.shape)
    runs, strides = list(boxes(shape, start, stop)), _strides(shape)
    found = []
    for part in parameter.parts:
        window = windows(part, shape)
        for low, high in runs:
            first = [max(a, w[0]) for a, w in zip(low, window)]
            size = [min(b, w[1]) - a for a, b, w in zip(first, high, window)]
            if min(size, default=1) > 0:
                at = sum(a * s for a, s in zip(first, strides)) - start
                kept = [i for i, w in enumerate(window) if not w[2]]
                kept = kept[::-1] if part.transposed else kept
                offset = tuple(o + first[i] - window[i][0] for o, i in zip(part.offset, kept, strict=True))
                sizes = tuple(size[i] for i in kept)
                found.append(
                    TensorBox(part.name, tuple(part.shape), offset, sizes, at, tuple(strides[i] for i in kept))
                )
    return found


def windows(part: Part, shape: Sequence[int]) -> list[tuple[int, int, bool]]:
    """(first, last + 1, whether the dimension is dropped) of every dimension of the local tensor that a part selects.

    Raises:
        ValueError: a slice with a step, or more selections than dimensions.
    """
    select = tuple(part.select) + (slice(None),) * (len(shape) - len(part.select))
    out = []
    for chosen, n in zip(select, shape, strict=True):
        if isinstance(chosen, slice):
            first, last, step = chosen.indices(n)
            if step != 1:
                raise ValueError(f"{part.name}: a part is a box, not every {step}th element")
            out.append((first, last, False))
        else:
            out.append((chosen % n, chosen % n + 1, True))
    return out


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, stop) of a flattened tensor as (low, high) boxes: the end of a row, whole rows, the beginning
    of a row, and so on inside."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    length = prod(inner)
    (first, head), (last, tail) = divmod(start, length), divmod(stop, length)
    if first == last:
        yield from (((first, *low), (first + 1, *high)) for low, high in boxes(inner, head, tail))
        return
    if head:
        yield from (((first, *low), (first + 1, *high)) for low, high in boxes(inner, head, length))
        first += 1
    if first < last:
        yield (first,) + (0,) * len(inner), (last, *inner)
    if tail:
        yield from (((last, *low), (last + 1, *high)) for low, high in boxes(inner, 0, tail))


def overlaps(target: TensorBox, sources: Sequence[TensorBox]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(index of the source, low, size) of every box in which a source block of the same tensor meets `target`."""
    if not sources:
        return
    form = len(sources), len(target.low)
    lows = np.array([b.low for b in sources], dtype=np.int64).reshape(form)
    highs = lows + np.array([b.size for b in sources], dtype=np.int64).reshape(form)
    first = np.array(target.low, dtype=np.int64)
    low = np.maximum(lows, first)
    size = np.minimum(highs, first + np.array(target.size, dtype=np.int64)) - low
    for i in np.flatnonzero((size > 0).all(axis=1)):
        yield int(i), tuple(low[i].tolist()), tuple(size[i].tolist())


def cover(shape: Sequence[int], found: Iterable[TensorBox]) -> str:
    """ "" when the blocks are every element of a tensor of this shape once; otherwise what is wrong."""
    found = sorted(found, key=lambda b: b.low)
    total, held = prod(shape), sum(prod(b.size) for b in found)
    inside = all(o >= 0 and o + n <= whole for b in found for o, n, whole in zip(b.low, b.size, shape, strict=True))
    if not inside:
        return f"a block lies outside {list(shape)}"
    if _meet(shape, found):
        return f"{held} elements held of {total}, some of them twice"
    return "" if held == total else f"{held} elements held of {total}"


def _meet(shape: Sequence[int], found: list[TensorBox]) -> bool:
    """Whether any two of the blocks, sorted by where they begin, have an element in common."""
    if not shape:
        return len(found) > 1
    lows = np.array([b.low for b in found], dtype=np.int64).reshape(-1, len(shape))
    highs = lows + np.array([b.size for b in found], dtype=np.int64).reshape(-1, len(shape))
    # only blocks that begin before this one's last row can meet it
    ends = np.searchsorted(lows[:, 0], highs[:, 0])
    for i, end in enumerate(ends.tolist()):
        later = slice(i + 1, end)
        if ((lows[later] < highs[i]) & (highs[later] > lows[i])).all(axis=1).any():
            return True
    return False


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
