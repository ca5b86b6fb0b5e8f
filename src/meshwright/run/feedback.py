"""Direct feedback: a layer's backward begins with the output's error through a fixed random matrix, whatever the layer
behind it says (Nøkland 2016, 1609.01596; Launay et al. 2020, 2006.12878, with whose matrices this is done).

The head's backward runs with its loss, in the forward of the last stage, and leaves the error there: the gradient of
the hidden states that entered it. Matrices are drawn from the run's seed by the name of the place that the error
enters, on every rank that holds it, so that they are the same under every plan, and no checkpoint has them.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.plan import Plan
from meshwright.plan.facets.feedback import Direct
from meshwright.run.parameters import drawn
from meshwright.run.pieces import Part


class _Enters(torch.autograd.Function):
    """Hidden states as they are, whose gradient is the error through a matrix [hidden, hidden] in place of their own;
    the error itself where there is no matrix."""

    @staticmethod
    def forward(ctx, x, feedback, matrix):
        ctx.feedback, ctx.matrix = feedback, matrix
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        error = ctx.feedback.error
        return (error if ctx.matrix is None else error @ ctx.matrix), None, None


class DirectFeedback:
    """How the blocks of a rank are entered by the output's error: ``error`` [S, b, hidden] is that of the microbatch
    whose backward runs."""

    def __init__(self, direct: Direct, hidden: int, seed: int, like: torch.Tensor):
        """Matrices are of the type and device of `like`."""
        self.direct, self.hidden, self.seed, self.like = direct, hidden, seed, like
        self.error: torch.Tensor | None = None
        self._common: torch.Tensor | None = None

    @classmethod
    def of(cls, plan: Plan, hidden: int, seed: int, like: torch.Tensor) -> DirectFeedback | None:
        """Return that of a plan; None where gradients come back from layer to layer."""
        direct = plan.feedback.direct
        return None if direct is None else cls(direct, hidden, seed, like)

    def matrix(self, name: str) -> torch.Tensor:
        """The matrix of a place, [hidden, hidden], even from -1 to 1 over the square root of the width."""
        part = Part(name, (self.hidden, self.hidden), (0, 0), (slice(None),))
        return drawn(part, self.seed, self.hidden**-0.5, uniform=True).to(self.like)

    def entry(self, layer: int, place: int) -> FeedbackEntry | None:
        """The place of a block that the error enters: 0 behind its attention, None where it does not there, and 1
        behind the block."""
        if not place and not self.direct.micro:
            return None
        return FeedbackEntry(self, None if self.direct.shared else self.matrix(f"feedback.{layer}.{place}"))

    def sent(self, gradient: torch.Tensor) -> torch.Tensor:
        """The error as all stages get it, of the gradient of the last block's output."""
        if not self.direct.shared:
            return gradient
        if self._common is None:
            self._common = self.matrix("feedback")
        return gradient @ self._common


class FeedbackEntry:
    """A place that the error enters."""

    def __init__(self, feedback: DirectFeedback, matrix: torch.Tensor | None):
        self.feedback, self.matrix = feedback, matrix

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states as they are."""
        return _Enters.apply(x, self.feedback, self.matrix) if torch.is_grad_enabled() else x


def answered(head: nn.Module, made: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a head on hidden states, and their gradient; those of its own parameters are with their sinks."""
    read = made.detach().requires_grad_()
    loss = head(read, *args)
    torch.autograd.backward(loss)
    return loss.detach(), read.grad
