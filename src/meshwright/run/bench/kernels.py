"""Micro-benchmarks of kernels: matrix products, attention cores, and one that reads and writes memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial

import torch

from meshwright.run.attention import attend
from meshwright.run.bench.clock import Bench
from meshwright.run.bench.operands import Operands, kept
from meshwright.run.bench.scope import BenchScope
from meshwright.run.mesh import AxisGroup

#: Results of attention that are kept, so that new ones go elsewhere: several times what a core keeps near.
KEPT_BYTES = 32 << 20


def gemms(pool: Operands, scope: BenchScope) -> Iterable[Bench]:
    """Yield every point of the grid; a product too large to time grows from the one before it along m."""
    for m in scope.gemm_m:
        for n in scope.gemm_nk:
            for k in scope.gemm_nk:
                scale = 1
                while 2.0 * m * n * k > scope.largest_flops * scale and m > 16 * scale:
                    scale *= 2
                yield Bench(partial(_product, int(m) // scale, int(n), int(k), pool), scale)


def _product(m: int, n: int, k: int, pool: Operands) -> Callable[[], object]:
    """Results go into memory that is there: a step's allocations are used again, those of a loop may be given back."""
    operands = itertools.cycle(pool.sets([(m, k), (n, k)], [(m, n)]))

    def product() -> None:
        left, right, result = next(operands)
        torch.mm(left, right.T, out=result)

    return product


def attentions(pool: Operands, scope: BenchScope, *, backward: bool) -> Iterable[Bench]:
    """Yield every causal core of the grid; one with too many scores grows from some of its heads."""
    for heads in scope.attention[0]:
        for tokens in scope.attention[1]:
            for width in scope.attention[2]:
                h, s, d, scale = int(heads), int(tokens), int(width), 1
                while h * s * s > scope.largest_scores and h > 1:
                    h, scale = h // 2, scale * 2
                yield Bench(partial(_core, h, s, d, pool, backward), scale)


def _core(h: int, s: int, d: int, pool: Operands, backward: bool) -> Callable[[], object]:
    lone = AxisGroup(name="cp", ranks=(0,), index=0)
    operands = pool.sets([(1, s, h, d)] * (4 if backward else 3))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, cp=lone, algorithm="ring")

    if not backward:
        inputs = itertools.cycle(operands)
        return kept(torch.no_grad()(lambda: (forward(*next(inputs)),)), KEPT_BYTES)
    done = [(forward(*(x.requires_grad_() for x in inputs)), inputs, grad) for *inputs, grad in operands]
    again = itertools.cycle(done)

    def gradients() -> tuple[torch.Tensor, ...]:
        out, inputs, grad = next(again)
        return torch.autograd.grad(out, inputs, grad, retain_graph=True)

    return kept(gradients, KEPT_BYTES)


def elementwise(pool: Operands, scope: BenchScope) -> Iterable[Bench]:
    """One kernel that reads two tensors and writes a third: so many bytes in all."""

    def make(size: float) -> Callable[[], object]:
        shape = (max(1, int(size / 12)),)
        operands = itertools.cycle(pool.sets([shape, shape], [shape]))

        def kernel() -> None:
            x, y, out = next(operands)
            torch.mul(x, y, out=out)

        return kernel

    return [Bench(partial(make, size)) for size in scope.elementwise]


__all__ = ["attentions", "elementwise", "gemms"]
