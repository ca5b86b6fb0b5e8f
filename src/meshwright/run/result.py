"""The outcome of a step, as every rank knows it."""

from __future__ import annotations

from typing import NamedTuple


class StepResult(NamedTuple):
    """Mean loss per token, tokens trained and the gradient's norm before clipping, over the whole job; loss and norm
    over the replica of this rank where replicas take steps of their own. A loss that is not finite was not applied:
    ``updated`` is False and parameters are as before, or, of such replicas, those of the last average lost."""

    loss: float
    num_tokens: int
    grad_norm: float
    updated: bool = True
