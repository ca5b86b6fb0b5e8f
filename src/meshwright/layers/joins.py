"""Signatures of a computation's steps: the placements with which every rank makes its part of a result alone.

On one axis of a mesh a join cuts one key: whoever has the key is cut along it, whoever has not is copied to all ranks
(a *broadcast*). A key of the result leaves a shard of it; a key that is summed leaves terms of a sum (both sides are
*co-partitioned* on it). A matrix product's signatures (``layers/signatures.py``) are those of its einsum. The rows of
a sparse relation may also be cut by their number, whatever their keys: a dim behind those of its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from meshwright.layers.algebra import PARTIAL, REPLICATE, Placement
from meshwright.spec.computation import (
    ADD,
    BY_NUMBER,
    JOIN,
    ON_EVERY_RANK,
    ONE,
    OVER_A_KEY,
    Computation,
    ComputationStep,
)

#: Placements on one axis of every input, then of the result.
AxisSignature = tuple[int, ...]
R, P = REPLICATE, PARTIAL


def einsum_signatures(inputs: Sequence[Sequence[str]], output: Sequence[str]) -> tuple[AxisSignature, ...]:
    """Return the signatures of a product of tensors with these keys that is summed over the keys which `output` has
    not: one for each key, terms of either side, and all of it on every rank."""
    found = []
    for key in dict.fromkeys(k for keys in (*inputs, output) for k in keys):
        ins = [_cut(keys, key) for keys in inputs]
        found.append((*ins, list(output).index(key) if key in output else P))
    for number in range(len(inputs)):
        found.append((*(P if i == number else R for i in range(len(inputs))), P))
    return (*found, (R,) * (len(inputs) + 1))


def _cut(keys: Sequence[str], key: str) -> int:
    return list(keys).index(key) if key in keys else R


def axis_signatures(step: ComputationStep, computation: Computation) -> tuple[AxisSignature, ...]:
    """Return the signatures of a step on one axis."""
    if step.kind == ONE:
        return ((R,),)
    sparse = [bool(computation.tensors[name].rows_of) for name in (*step.inputs, step.output)]
    whole = (R,) * (len(step.inputs) + 1)
    by_rows = tuple(len(keys) if here else R for here, keys in zip(sparse, (*step.read, step.keys)))
    rows = [by_rows] if any(sparse) else []
    if step.kind == JOIN:
        if rows and not sparse[-1]:
            rows = [(*by_rows[:-1], P)]
        return (*einsum_signatures(step.read, step.keys), *rows)
    keys = [key for key in step.keys if not (step.kind in OVER_A_KEY and key == step.over)]
    cut = [(*(_cut(its, key) for its in step.read), step.keys.index(key)) for key in keys]
    terms = [(P,) * len(whole)] if step.kind == ADD else []
    return (*cut, *rows, *terms, whole)


def signatures(
    step: ComputationStep, computation: Computation, sizes: Sequence[int]
) -> Iterator[tuple[tuple[Placement, ...], Placement]]:
    """Yield the signatures of a step on all axes of a mesh that leave no rank without a part: placements of its inputs,
    and that of its result."""
    names = (*step.inputs, step.output)
    shapes = [computation.shape(name) for name in names]
    for chosen in product(axis_signatures(step, computation), repeat=len(sizes)):
        places = list(zip(*chosen)) if chosen else [()] * len(names)
        if all(fits(shape, place, sizes) for shape, place in zip(shapes, places)):
            yield tuple(places[:-1]), places[-1]


def fits(shape: Sequence[int], place: Placement, sizes: Sequence[int]) -> bool:
    """Whether every rank has a part of a tensor."""
    left = list(shape)
    for p, size in zip(place, sizes):
        if p >= 0:
            left[p] //= size
    return all(left)


def homes(computation: Computation, name: str, sizes: Sequence[int]) -> Iterator[Placement]:
    """Yield the placements that an input may have: it is given whole or in parts, and never as terms of a sum."""
    shape = computation.shape(name)
    for place in product((*range(len(shape)), R), repeat=len(sizes)):
        if fits(shape, place, sizes):
            yield place


def cut_along(step: ComputationStep, signature: AxisSignature) -> str:
    """The key that a step's signature on one axis cuts, :data:`BY_NUMBER` or :data:`ON_EVERY_RANK`; "" where it keeps
    terms of a sum."""
    for keys, place in zip((*step.read, step.keys), signature, strict=True):
        if place >= 0:
            return keys[place] if place < len(keys) else BY_NUMBER
    return ON_EVERY_RANK if P not in signature else ""


def way(step: ComputationStep, signature: AxisSignature) -> str:
    """How a join is made on one axis, in words: of its signature there."""
    *ins, out = signature
    if out == P and P in ins:
        return f"terms of {step.inputs[ins.index(P)]} kept"
    key, copied = cut_along(step, signature), [name for name, p in zip(step.inputs, ins) if p == R]
    if key == ON_EVERY_RANK:
        return "whole on every rank"
    words = "rows cut by number" if key == BY_NUMBER else f"cut along {key}"
    if len(copied) < len(ins) - 1 and key != BY_NUMBER:
        words = f"co-partitioned on {key}"
    if copied:
        words += f", {' and '.join(dict.fromkeys(copied))} copied"
    return f"{words}, results summed" if out == P else words
