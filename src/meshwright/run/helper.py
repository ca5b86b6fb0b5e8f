"""A replica that sums gradients and has no part of the batch (the auxiliary peers of DeDLOC, Diskin et al. 2106.10207).

It holds the model and takes every step, so that any plan goes on from its state, and brings nothing to the sums. Those
of the others begin in the order in which their backward releases gradients; it learns that order from one pass of its
own, whose loss counts nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from meshwright.run.data import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.run.sync import Bucket
    from meshwright.run.trainer import Trainer


class Helper:
    """The part of a trainer in a step to which it brings nothing."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.order: list[Bucket] = []

    def sums(self) -> torch.Tensor:
        """Begin the sums of a step, of gradients that are zero; the loss, which is none."""
        trainer = self.trainer
        if not self.order:
            return self._learn()
        for bucket in self.order:
            bucket.exchange()
        return torch.zeros((), dtype=torch.float64, device=trainer.mesh.device)

    def _learn(self) -> torch.Tensor:
        """The first step: pass a batch whose loss counts nothing, and note when each sum begins."""
        trainer = self.trainer
        (length, _, size), count = trainer.shape, trainer.plan.num_microbatches(trainer.train.global_batch)
        empty = Batch(torch.zeros((count * size, length + 1), dtype=torch.int64), None)
        for bucket in trainer.exchanges:
            bucket.exchange = partial(self._begun, bucket, bucket.exchange)
        try:
            return trainer.pipeline.run([one._replace(scale=0.0) for one in trainer.passes(empty)])
        finally:
            for bucket in trainer.exchanges:
                del bucket.exchange

    def _begun(self, bucket: Bucket, exchange: Callable[[], None]) -> None:
        self.order.append(bucket)
        exchange()
