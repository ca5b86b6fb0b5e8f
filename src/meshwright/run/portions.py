"""Layers, and head and loss, in portions of the sequence (StreamBP, Luo et al. 2506.03077).

The forward of a layer keeps what it is given. The backward computes it again portion by portion and differentiates each
portion before the next; a loss is computed there alone. Gradients of weights are added up where they belong: in the
sink of a weight that has one, which is told of so many contributions, or else beside the module, from where autograd
takes them once, so that whoever gathers and reduces a layer's parameters does so once a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from meshwright.run.linear import Sink

if TYPE_CHECKING:
    from meshwright.run.parts import Pass

#: Formats in which many small contributions are not added up.
HALVES = (torch.bfloat16, torch.float16)


class PortionedLayer(Protocol):
    """A layer whose backward goes portion by portion."""

    def whole(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The forward, without a graph."""

    def back(self, x: torch.Tensor, grad: torch.Tensor, p: Pass, ended: Callable[[], None]) -> torch.Tensor:
        """Return the gradient of `x`; those of parameters are left with them as of any backward, and `ended` is called
        behind each portion's."""


class PortionedLoss(Protocol):
    """A loss that is summed portion by portion."""

    def summed(self, x: torch.Tensor, p: Pass, each: Callable[..., None]) -> torch.Tensor:
        """Return the loss of `x`; `each` is given the first token, the last + 1, the tokens and the loss of every
        portion."""


def cuts(length: int, count: int) -> list[tuple[int, int]]:
    """The (first, last + 1) tokens of each of `count` portions of a sequence, the first tokens first."""
    return list(pairwise(length * i // count for i in range(count + 1)))


def portion(p: Pass, start: int, stop: int) -> Pass:
    """Return the arguments of a pass of some of its tokens."""

    def turned(both: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, ...] | None:
        if both is None:
            return None
        return tuple(x.narrow(x.dim() - 3, start, stop - start) for x in both)  # [s, 1, width] or [b, s, 1, width]

    return p._replace(
        tokens=p.tokens[:, start:stop],
        targets=p.targets[:, start:stop],
        rows=p.rows[start:stop],
        rotary=turned(p.rotary),
        local=turned(p.local),
    )


def again(layer: PortionedLayer, x: torch.Tensor, p: Pass) -> torch.Tensor:
    """Return a layer's forward, to be repeated in portions by its backward."""
    places = tuple(_places((layer,)))
    return _Again.apply(layer, places, p, x, *(parameters[name] for parameters, name in places))


def later(head: PortionedLoss, x: torch.Tensor, p: Pass, beside: Sequence[nn.Module] = ()) -> torch.Tensor:
    """Return a loss that its backward fills in: it computes the scores of each portion once, and differentiates them.
    Of modules `beside` it uses parameters."""
    places = tuple(_places((head, *beside)))
    return _Later.apply(head, places, p, x, *(parameters[name] for parameters, name in places))


def _places(modules: Sequence[nn.Module]) -> Iterator[tuple[dict[str, nn.Parameter], str]]:
    """Yield the dictionary and the name of every parameter of some modules."""
    for module in modules:
        for inner in module.modules():
            for name, parameter in inner._parameters.items():
                if parameter is not None:
                    yield inner._parameters, name


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, places, p, x, *parameters):
        ctx.module, ctx.places, ctx.p = module, places, p
        ctx.save_for_backward(x)
        return module.whole(x, p)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with _aliases(ctx.places) as held:
            back = ctx.module.back(x.detach(), grad, ctx.p, held.ended)
        return None, None, None, back, *held.gradients()


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, places, p, x, *parameters):
        ctx.head, ctx.places, ctx.p = head, places, p
        ctx.save_for_backward(x)
        out = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        ctx.found = out.detach()  # the same memory
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        back = torch.empty_like(x)
        with _aliases(ctx.places) as held:

            def each(first: int, end: int, mine: torch.Tensor, loss: torch.Tensor) -> None:
                torch.autograd.backward(loss, grad.to(loss.dtype))
                back[first:end] = mine.grad
                held.ended()

            ctx.found.copy_(ctx.head.summed(x, ctx.p, each))
        return None, None, None, back, *held.gradients()


class _Sum:
    """The sum of a parameter's gradients where it has no sink: at least fp32."""

    def __init__(self, parameter: nn.Parameter):
        self.dtype = parameter.dtype
        self.value: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        if self.value is None:
            self.value = gradient.to(torch.float32) if self.dtype in HALVES else gradient.clone()
        else:
            self.value.add_(gradient)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.add(left.T @ right)

    def taken(self) -> torch.Tensor | None:
        """Return the sum in the parameter's precision."""
        return None if self.value is None else self.value.to(self.dtype)


class _Held:
    """Aliases of parameters while portions are differentiated, each with the sink of its gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        self.sinks: list[Sink] = [getattr(one, "sink", None) or _Sum(one) for one in parameters]
        self.aliases = []
        for one, sink in zip(parameters, self.sinks):
            alias = nn.Parameter(one.detach(), requires_grad=one.requires_grad)
            alias.sink = sink
            self.aliases.append(alias)

    def ended(self) -> None:
        """A portion was differentiated: what autograd left goes to the sinks, as products' gradients did."""
        for alias, sink in zip(self.aliases, self.sinks):
            if alias.grad is not None:
                gradient, alias.grad = alias.grad, None
                sink.add(gradient)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients for autograd: the sum of each parameter, nothing where a sink has it."""
        return [sink.taken() if isinstance(sink, _Sum) else None for sink in self.sinks]


@contextmanager
def _aliases(places: Sequence[tuple[dict[str, nn.Parameter], str]]) -> Iterator[_Held]:
    """Put aliases into the places of parameters, on which no hook waits for gradients."""
    before = [parameters[name] for parameters, name in places]
    held = _Held(before)
    for (parameters, name), alias in zip(places, held.aliases):
        parameters[name] = alias
    try:
        yield held
    finally:
        for (parameters, name), parameter in zip(places, before):
            parameters[name] = parameter
