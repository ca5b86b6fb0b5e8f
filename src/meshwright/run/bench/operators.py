"""Micro-benchmarks of a model's memory-bound operators, as the executor runs them: how many kernels that is, and what
torch spends around them, differs from operator to operator.

Several instances of an operator run forward, then backward in one pass, so that starting a backward is shared among
them as it is among the operators of a model. Their operands together are more than a core's own cache holds. Sizes are
bytes as lowering counts them (``lower/``): those a fused kernel would move.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch.nn import functional as F

from meshwright.run.activation import activate
from meshwright.run.bench.clock import Bench
from meshwright.run.bench.scope import BenchScope
from meshwright.run.loss import ShardedCrossEntropy, cross_entropy
from meshwright.run.mesh import AxisGroup
from meshwright.run.rotary import rotate
from meshwright.spec.layers import Dense

WIDTH, HEAD, VOCAB = 256, 64, 1024
_LONE = AxisGroup(name="tp", ranks=(0,), index=0)


class Operator(NamedTuple):
    """``make`` gives (a function, its inputs) for so many elements. ``forward`` and ``backward``: how many times an
    element's own bytes are moved for each, and how many bytes beside."""

    make: Callable[[int, torch.device, torch.dtype], tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]
    forward: tuple[float, float]
    backward: tuple[float, float]


class OperatorWidths(NamedTuple):
    """OperatorWidths of what operators read: of hidden states, of a head, and of the logits."""

    hidden: int
    head: int
    vocab: int


#: As models have them that run there: rows of a GPU's kernels are each a block of threads.
ON = {"cpu": OperatorWidths(WIDTH, HEAD, VOCAB), "cuda": OperatorWidths(4096, 128, 32768)}


@cache
def _noise(device: torch.device) -> torch.Tensor:
    """Standard normal numbers, drawn once: copying them is much quicker."""
    return torch.randn(1 << 22, device=device)


def _leaf(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    noise = _noise(device)
    drawn = noise[: prod(shape)] if prod(shape) <= len(noise) else torch.randn(prod(shape), device=device)
    return drawn.to(dtype, copy=True).view(shape).requires_grad_()


def _rmsnorm(n, device, dtype):
    width = ON[device.type].hidden
    return (
        lambda x, w: F.rms_norm(x, (width,), w, 1e-5),
        (_leaf(device, dtype, n // width, 1, width), _leaf(device, dtype, width)),
    )


def _layernorm(n, device, dtype):
    width = ON[device.type].hidden
    w, b = _leaf(device, dtype, width), _leaf(device, dtype, width)
    return (lambda x, w, b: F.layer_norm(x, (width,), w, b, 1e-5)), (_leaf(device, dtype, n // width, 1, width), w, b)


def _bias(n, device, dtype):
    """Backward, the gradient is summed over the rows."""
    width = ON[device.type].hidden
    return (lambda x, b: x + b), (_leaf(device, dtype, n // width, 1, width).detach(), _leaf(device, dtype, width))


def _rotary(n, device, dtype):
    heads, width = 4, ON[device.type].head
    tokens = max(1, n // (heads * width))
    table = torch.randn(tokens, 1, width, device=device).to(dtype)
    return (lambda x: rotate(x, table, table)), (_leaf(device, dtype, 1, tokens, heads, width),)


def _activation(gated):
    spec = Dense(ffn=WIDTH, gated=gated, activation="silu" if gated else "gelu")

    def make(n, device, dtype):
        width = ON[device.type].hidden * (2 if gated else 1)
        return (lambda x: activate(x, spec)), (_leaf(device, dtype, n // width, 1, width),)

    return make


def _residual(n, device, dtype):
    """Backward, the gradient that comes through a branch is added to the one that goes past it."""
    width = ON[device.type].hidden
    return (lambda x: x + x.view_as(x)), (_leaf(device, dtype, n // width, 1, width),)


def _embedding(n, device, dtype):
    width = ON[device.type].hidden
    tokens = torch.randint(0, VOCAB, (n // width, 1), device=device)
    return (lambda w: F.embedding(tokens, w)), (_leaf(device, dtype, VOCAB, width),)


def _loss(n, device, dtype):
    vocab = ON[device.type].vocab
    targets = torch.randint(0, vocab, (n // vocab, 1), device=device)
    return (lambda x: cross_entropy(x, targets, 0, _LONE)), (_leaf(device, dtype, n // vocab, 1, vocab),)


def _sharded_loss(n, device, dtype):
    vocab = ON[device.type].vocab
    targets = torch.randint(0, 2 * vocab, (n // vocab, 1), device=device)
    return (
        lambda x: ShardedCrossEntropy.apply(x, targets, 0, _LONE).sum(),
        (_leaf(device, dtype, n // vocab, 1, vocab),),
    )


#: What moves: see the pieces of the same names in ``lower/``. A loss is computed in fp32.
OPERATORS = {
    "rmsnorm": Operator(_rmsnorm, (2.0, 0.0), (3.0, 0.0)),
    "layernorm": Operator(_layernorm, (2.0, 0.0), (3.0, 0.0)),
    "bias": Operator(_bias, (2.0, 0.0), (1.0, 0.0)),
    "rotary": Operator(_rotary, (2.0, 0.0), (2.0, 0.0)),
    "gated activation": Operator(_activation(True), (1.5, 0.0), (2.5, 0.0)),
    "activation": Operator(_activation(False), (2.0, 0.0), (3.0, 0.0)),
    "residual": Operator(_residual, (3.0, 0.0), (3.0, 0.0)),
    "embedding": Operator(_embedding, (2.0, 0.0), (3.0, 0.0)),
    "loss": Operator(_loss, (1.0, 28.0), (1.0, 20.0)),
    "sharded loss": Operator(_sharded_loss, (1.0, 28.0), (1.0, 20.0)),
}


def sizes(name: str, element: float, scope: BenchScope) -> tuple[float, ...]:
    """Bytes that the benchmarks of an operator (``rmsnorm``, ``rmsnorm backward``) stand for, of elements of so many
    bytes."""
    operator = OPERATORS[name.removesuffix(" backward")]
    times, beside = operator.backward if name.endswith(" backward") else operator.forward
    return tuple((times * element + beside) * n for n in scope.elements)


def benches(device: torch.device, dtype: torch.dtype, scope: BenchScope) -> dict[str, list[Bench]]:
    """List the benchmarks, by operator and at the scope's ``elements`` each; seconds are those of one instance."""
    out: dict[str, list[Bench]] = {}
    for name, operator in OPERATORS.items():
        for n in scope.elements:
            out.setdefault(name, []).append(_bench(operator, n, device, dtype, scope, backward=False))
            out.setdefault(f"{name} backward", []).append(_bench(operator, n, device, dtype, scope, backward=True))
    return out


def _bench(
    operator: Operator, n: int, device: torch.device, dtype: torch.dtype, scope: BenchScope, *, backward: bool
) -> Bench:
    count = max(1, min(scope.most_instances, scope.together // n))

    def make() -> Callable[[], object]:
        made = [operator.make(n, device, dtype) for _ in range(count)]

        def forward() -> list[torch.Tensor]:
            return [run(*inputs) for run, inputs in made]

        if not backward:
            return forward
        outs = forward()
        grads = [torch.ones_like(out) for out in outs]
        inputs = [x for _, many in made for x in many if x.requires_grad]
        return lambda: torch.autograd.grad(outs, inputs, grads, retain_graph=True)

    return Bench(make, 1.0 / count)


__all__ = ["OPERATORS", "Operator", "benches", "sizes"]
