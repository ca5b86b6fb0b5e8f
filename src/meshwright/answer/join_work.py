"""Work of a computation's steps on one rank: products of matrices, and memory-bound kernels for all else.

A dense join that sums a shared key is a batch of matrix products. One with a sparse relation gathers a row of each
dense side for every row of the relation and scatters what it makes, so that its bytes go with the relation's rows,
which are taken to be spread evenly over keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from meshwright.answer.placed_prices import PlacedPrices, cut
from meshwright.layers.algebra import Placement
from meshwright.spec.computation import ADD, JOIN, KEY_BYTES, ONE, Computation, ComputationStep
from meshwright.work import Elementwise, Gemm, Work


def local_numbers(computation: Computation, name: str, place: Placement, sizes: Sequence[int]) -> float:
    """Values of a tensor on the rank with the most; of a sparse one in the mean."""
    shape = cut(computation.shape(name), place, sizes)
    tensor = computation.tensors[name]
    if not tensor.rows_of:
        return prod(shape)
    places = prod(computation.dims[key] for key in tensor.keys)
    return prod(shape) / places


def local_bytes(computation: Computation, name: str, place: Placement, sizes: Sequence[int], element: float) -> float:
    """Bytes of a rank's part of a tensor, the keys of sparse rows among them."""
    return local_numbers(computation, name, place, sizes) * computation.row_bytes(name, element)


def step_seconds(
    step: ComputationStep, computation: Computation, ins: Sequence[Placement], out: Placement, prices: PlacedPrices
) -> float:
    """Seconds of a rank's part of a step."""
    return sum(prices.price(work) for work in _works(step, computation, ins, out, prices))


def _works(
    step: ComputationStep, computation: Computation, ins: Sequence[Placement], out: Placement, prices: PlacedPrices
) -> list[Work]:
    sizes, element = prices.mesh.sizes, prices.element
    names = (*step.inputs, step.output)
    each = [
        local_bytes(computation, name, place, sizes, element) for name, place in zip(names, (*ins, out), strict=True)
    ]
    if step.kind == ONE or (step.kind == ADD and not step.keys):
        return []
    sparse = next((i for i, name in enumerate(step.inputs) if computation.tensors[name].rows_of), None)
    if step.kind != JOIN:
        return [Elementwise(num_bytes=sum(each))]
    if sparse is not None:
        return [_gathered(step, computation, ins, sparse, each, prices)]
    return _product(step, computation, ins, out, sum(each), prices)


def _lengths(
    step: ComputationStep, computation: Computation, ins: Sequence[Placement], out: Placement, sizes: Sequence[int]
) -> dict[str, int]:
    """How long every key is on a rank."""
    found: dict[str, int] = {}
    for keys, place in zip((*step.read, step.keys), (*ins, out), strict=True):
        for key, length in zip(keys, cut([computation.dims[k] for k in keys], place, sizes)):
            found[key] = min(length, found.get(key, length))
    return found


def _gathered(
    step: ComputationStep,
    computation: Computation,
    ins: Sequence[Placement],
    sparse: int,
    each: Sequence[float],
    prices: PlacedPrices,
) -> Elementwise:
    """A join with a sparse relation: each of its rows reads a row of every dense side, and what it makes is written."""
    pattern = set(step.read[sparse])
    rows = local_numbers(computation, step.inputs[sparse], ins[sparse], prices.mesh.sizes)
    row = KEY_BYTES * len(pattern)
    for name, keys, place in zip(step.inputs, step.read, ins):
        if computation.tensors[name].rows_of:
            row += prices.element
            continue
        shape = cut([computation.dims[k] for k in keys], place, prices.mesh.sizes)
        row += prices.element * prod(n for k, n in zip(keys, shape) if k not in pattern)
    return Elementwise(num_bytes=rows * row + each[-1], fused=True)


def _product(
    step: ComputationStep,
    computation: Computation,
    ins: Sequence[Placement],
    out: Placement,
    num_bytes: float,
    prices: PlacedPrices,
) -> list[Work]:
    """A dense join: a matrix product where it sums a key that both sides have."""
    plain = [Elementwise(num_bytes=num_bytes)]
    if len(step.inputs) != 2:
        return plain
    length = _lengths(step, computation, ins, out, prices.mesh.sizes)
    left, right = (set(keys) for keys in step.read)
    kept = set(step.keys)

    def size(keys: set[str]) -> int:
        return prod(length[key] for key in keys)

    k, m, n = size(left & right - kept), size((left - right) & kept), size((right - left) & kept)
    if k == 1 or m * n == 1:
        return plain
    works: list[Work] = [
        Gemm(m=m, n=n, k=k, batch=size(left & right & kept), dtype=prices.dtype, out_bytes=prices.element)
    ]
    for keys, other in ((left, right), (right, left)):
        if keys - other - kept:  # summed by itself first
            works.append(Elementwise(num_bytes=prices.element * (size(keys) + size(keys - (keys - other - kept)))))
    return works
