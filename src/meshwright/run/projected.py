"""Steps by slopes: replicas measure by forward passes how their loss changes along a direction, and send a byte each
(Zelikman et al. 2306.10015)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from meshwright.run.collect import all_gather_single
from meshwright.run.mesh import AxisGroup
from meshwright.run.optimizer import Optimizer
from meshwright.run.record import recorder
from meshwright.run.result import StepResult
from meshwright.run.settings import Settings
from meshwright.run.sync import Bucket

if TYPE_CHECKING:
    from meshwright.run.data import Batch
    from meshwright.run.trainer import Trainer

#: The byte of a slope that is no number.
NO_NUMBER = -128


class ProjectedSteps:
    """The directions of a rank's parameters, its buckets, and what becomes of the slopes along them: ``apart`` is how
    far a step to either side goes, ``levels`` how many of the byte are one of the slope.

    A direction is drawn from (seed, step, replica), so that every replica has all of them. What is added to measure is
    taken away by putting back what was there, to the last bit."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizer: Optimizer,
        group: AxisGroup,
        settings: Settings,
        apart: float,
        levels: int,
    ):
        self.buckets, self.optimizer, self.group, self.settings = buckets, optimizer, group, settings
        self.apart, self.levels = apart, levels
        self._kept: list[torch.Tensor] = []

    def direction(self, step: int, replica: int, number: int, like: torch.Tensor) -> torch.Tensor:
        """The part of a replica's direction in a step that is of the bucket of this number."""
        mixed = blake2b(repr((self.settings.seed, step, replica, number)).encode(), digest_size=8).digest()
        drawn = torch.Generator(like.device).manual_seed(int.from_bytes(mixed, "little") >> 1)
        return torch.randn(len(like), generator=drawn, dtype=like.dtype, device=like.device)

    def taken(
        self, step: int, run: Callable[[], torch.Tensor], publish: Callable[[], None]
    ) -> tuple[float, float, bool]:
        """Take a step: the loss, the length of the slopes' mean step, and whether it was finite. `run` gives this
        rank's part of the loss, of parameters that `publish` gives to the passes."""
        losses, count = [], self.group.size
        self.begin()
        for side in (1, -1):
            self.aside(step, side)
            publish()
            losses.append(run())
        codes = self.exchange(*(float(one) * count for one in losses)).tolist()
        loss, _, _ = self.optimizer.totals((losses[0] + losses[1]) / 2)
        finite = NO_NUMBER not in codes and loss == loss and abs(loss) != float("inf")
        if finite:
            with recorder().span("optimizer"), torch.no_grad():
                self.update(step, codes)
        publish()
        return loss, sum((code / self.levels) ** 2 for code in codes) ** 0.5 / count, finite

    def begin(self) -> None:
        """Remember the parameters as they are."""
        self._kept = [bucket.master.clone() for bucket in self.buckets]

    def aside(self, step: int, side: int) -> None:
        """Put the parameters to one side, 1 or -1, along this replica's direction."""
        for number, (bucket, kept) in enumerate(zip(self.buckets, self._kept)):
            along = self.direction(step, self.group.index, number, kept)
            bucket.master.copy_(kept).add_(along, alpha=side * self.apart)

    def exchange(self, above: float, below: float) -> torch.Tensor:
        """Put the parameters back, and send the slope between the losses on both sides: the bytes of all, int8."""
        for bucket, kept in zip(self.buckets, self._kept):
            bucket.master.copy_(kept)
        self._kept = []
        slope = (above - below) / (2 * self.apart)
        coded = NO_NUMBER if slope != slope else round(max(-127.0, min(127.0, slope * self.levels)))
        device = self.buckets[0].master.device
        own = torch.tensor([coded], dtype=torch.int8, device=device)
        every = own.new_empty(self.group.size)
        with recorder().span("all_gather", "dp", group=self.group.ranks, num_bytes=every.nbytes):
            all_gather_single(every, own, group=self.group.handle)
        return every

    def update(self, step: int, codes: Sequence[int]) -> None:
        """Step along every replica's direction by the mean of the slopes; matrices decay."""
        rate = self.settings.lr_at(step)
        for h in self.optimizer.held:
            if h.decays:
                h.master.mul_(1 - rate * self.settings.weight_decay)
        for replica, code in enumerate(codes):
            for number, bucket in enumerate(self.buckets):
                along = self.direction(step, replica, number, bucket.master)
                bucket.master.sub_(along, alpha=rate * code / self.levels / len(codes))


def projected_step(trainer: Trainer, steps: ProjectedSteps, batch: Batch) -> StepResult:
    """One step of a trainer by slopes of the loss."""
    trainer.wait_to_write()  # what is added to measure is a write as well
    run = partial(trainer.pipeline.run, trainer.passes(batch))
    loss, norm, finite = steps.taken(trainer.step_count, run, trainer.publish)
    trainer.step_count += finite
    recorder().step_end()
    return StepResult(loss, batch.num_targets or trainer.train.tokens_per_step, norm, finite)
