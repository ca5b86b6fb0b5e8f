"""Extragradient steps from a reference point, by sums of what gradients differ from those there
(:mod:`~meshwright.run.referenced_sum`; Beznosikov et al. 2110.03313)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import POINT, TensorPiece
from meshwright.sync.moving import moves

if TYPE_CHECKING:
    from meshwright.run.optimizer import Optimizer
    from meshwright.run.sync import Bucket


class ReferencedSteps:
    """Extragradient steps of a rank: :meth:`begin` puts its parameters half-way, :meth:`end` to where the step goes
    from, which is a share 1 / ``every`` of the reference; that moves once in ``every`` steps in the mean."""

    def __init__(self, buckets: Sequence[Bucket], optimizer: Optimizer, world: AxisGroup, every: int, seed: int):
        self.buckets, self.optimizer, self.world, self.every, self.seed = list(buckets), optimizer, world, every, seed
        #: No numbers where there is no reference yet.
        self.points = [torch.full_like(h.master, float("nan")) for h in optimizer.held]
        self.known = False
        self._from: list[torch.Tensor] = []
        self._before: list[torch.Tensor] | None = None

    def begin(self, step: int, gradients: Callable[[], object]) -> None:
        """Move the reference if that is due, where `gradients` sums those of a pass, and put parameters half-way along
        the reference's gradient."""
        held = self.optimizer.held
        if not self.known or moves(step, self.every, self.seed):
            self._refer(True)
            gradients()
            self._refer(False)
            self._before, self.points = self.points, [h.master.clone() for h in held]
        for bucket in self.buckets:
            bucket.mine().copy_(bucket.code.total)
        self._from = [h.master.clone() for h in held]
        rate, decay = self.optimizer.settings.lr_at(step), self.optimizer.settings.weight_decay
        for h, point in zip(held, self.points):
            h.master.lerp_(point, 1 / self.every)
            along = h.gradient.to(h.master.dtype)
            h.master.sub_(along.add(h.master, alpha=decay) if h.decays else along, alpha=rate)

    def _refer(self, refers: bool) -> None:
        for bucket in self.buckets:
            bucket.code.refers = refers

    def end(self, used: bool) -> None:
        """Put parameters to where the step goes from, or, where it is not taken, back."""
        for h, known, point in zip(self.optimizer.held, self._from, self.points):
            h.master.copy_(known)
            if used:
                h.master.lerp_(point, 1 / self.every)
        if self._before is not None and not used:
            self.points = self._before
        self.known, self._from, self._before = self.known or used, [], None

    def set_step(self) -> None:
        """Go on from states that were loaded: with the reference, if all ranks have one."""
        sound = all(bool(torch.isfinite(point).all()) for point in self.points)
        known = torch.tensor(float(sound), device=self.optimizer.device)
        dist.all_reduce(known, op=dist.ReduceOp.MIN, group=self.world.handle)
        self.known = bool(known)

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the reference point, live."""
        for h, point in zip(self.optimizer.held, self.points):
            yield TensorPiece(POINT, h.parameter, h.start, h.stop, point, h.owner)
