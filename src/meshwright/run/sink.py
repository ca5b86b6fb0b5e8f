"""Sinks: contributions to a parameter's gradient go into the flat gradient of what it is exchanged with."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

#: Types of 16 bits, whose products a GPU sums in 32.
HALVES = (torch.bfloat16, torch.float16)


class SummedInto(Protocol):
    """Something that contributions are summed into: gradients of type ``grads``, begun anew with every ``round``."""

    grads: torch.dtype
    round: int

    def gradient_buffer(self) -> torch.Tensor:
        """The flat gradient."""

    def arrived(self) -> None:
        """One contribution was added."""


class GradientSink:
    """Where one parameter's gradient contributions go: a view of its bucket's gradient. The first contribution of a
    round is written, the others are added, so that no buffer has to be zeroed."""

    def __init__(self, bucket: SummedInto, at: int, parameter: nn.Parameter):
        self.bucket, self.at, self.shape, self.size = bucket, at, parameter.shape, parameter.numel()
        self.round = 0
        #: The view that was made last, and of what.
        self.whole: torch.Tensor | None = None
        self.view: torch.Tensor | None = None

    def _view(self) -> tuple[torch.Tensor, bool]:
        """Where the gradient goes, and whether there is something to add to."""
        whole = self.bucket.gradient_buffer()
        begun, self.round = self.round == self.bucket.round, self.bucket.round
        if self.whole is not whole:
            self.whole, self.view = whole, whole[self.at : self.at + self.size].view(self.shape)
        return self.view, begun

    def forget(self) -> None:
        """Let go of the memory that the view is of."""
        self.whole = self.view = None

    def add(self, gradient: torch.Tensor) -> None:
        view, begun = self._view()
        if begun:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self.bucket.arrived()

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        grads = self.bucket.grads
        widened = left.is_cuda and left.dtype in HALVES and grads == torch.float32  # by the GPU's product itself
        if len(self.shape) != 2 or not (widened or left.dtype == grads):
            return self.add((left.T @ right).view(self.shape))
        view, begun = self._view()
        if widened:
            torch.addmm(view, left.T, right, out_dtype=grads, beta=1 if begun else 0, out=view)
        else:
            view.addmm_(left.T, right, beta=1 if begun else 0)
        self.bucket.arrived()

    def complete(self) -> None:
        """A round without a contribution is one of zeros."""
        view, begun = self._view()
        if not begun:
            view.zero_()


def hand_over(parameter: nn.Parameter) -> None:
    """Move the gradient that autograd left for a parameter to its bucket."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:  # a product gave its weight's gradient to the sink itself
        parameter.sink.add(gradient)
