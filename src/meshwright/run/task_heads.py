"""Heads of several tasks on one trunk: each predicts the token one place further ahead (``sync/merged.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from meshwright.run.hybrid import HybridHead
from meshwright.run.loss import cross_entropy
from meshwright.run.parts import EmbeddingModule, HeadModule, Pass, Shared

if TYPE_CHECKING:
    from collections.abc import Sequence


class TaskHeads(HeadModule):
    """The head of a model with those of further tasks beside it; the loss is the sum of those of ``tasks``."""

    def __init__(self, shared: Shared, tied: EmbeddingModule | None):
        super().__init__(shared, tied)
        #: The tasks that are trained.
        self.tasks: Sequence[int] = range(len(self.taught) + 1)
        #: Told the loss of each of them in every microbatch, where somebody asks.
        self.seen: Callable[[torch.Tensor], None] | None = None

    def loss(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The losses of all tasks that are trained, each in the mean over the tokens that it has, together."""
        hidden, targets, out = self.normed(x), p.targets.T, []
        for task in self.tasks:
            logits = self.projected(hidden[: len(hidden) - task], self.taught[task - 1] if task else None)
            found = cross_entropy(logits, targets[task:], self.first, self.shared.tp)
            out.append(found * (p.scale * len(hidden) / len(logits)))
        losses = torch.stack(out)
        if self.seen is not None:
            self.seen(losses.detach())
        return losses.sum()


class HybridTaskHeads(TaskHeads, HybridHead):
    """The same behind the norm of a hybrid model."""
