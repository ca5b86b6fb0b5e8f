"""Steps from a reference point: sums of what gradients differ from those at a reference, and the extragradient steps
that are taken by them (Beznosikov et al. 2110.03313)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.run.coded import OWN_REFERENCE, CodedSum
from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import POINT, TensorPiece
from meshwright.sync.fragments import Fragment
from meshwright.sync.moving import moves
from meshwright.sync.record import NO_CODEC

if TYPE_CHECKING:
    from meshwright.run.optimizer import Optimizer
    from meshwright.run.sync import Bucket


class ReferencedSum:
    """The sum over a group of gradients of `length` values like `like`: that at the reference, which all know, and what
    all differ from theirs there, in the codec of a fragment. As a coded sum is used. While it ``refers`` gradients are
    those of a new reference, which travel as they are."""

    def __init__(self, fragment: Fragment, group: AxisGroup, length: int, like: torch.Tensor, seed: int = 0):
        self.differences = CodedSum(fragment, group, length, like, seed)
        self.whole = CodedSum(msgspec.structs.replace(fragment, codec=NO_CODEC), group, length, like, seed)
        self.own, self.total = like.new_zeros(length), like.new_zeros(length)
        self.refers, self.group = False, group
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, values: torch.Tensor, **said: Any) -> None:
        """Start sending a gradient [length]; `said` is added to the spans."""
        if not self.refers:
            self.differences.begin(values - self.own, **said)
            return
        self._before, self.own = (self.own, self.total), values.clone()
        self.whole.begin(values, **said)

    def advance(self) -> None:
        """Start the second of two messages, where there is one."""
        self.differences.advance()

    def end(self) -> torch.Tensor:
        """Wait for what all sent: the sum of gradients [length]."""
        if not self.refers:
            return self.differences.end() + self.total
        self.total = self.whole.end().clone()
        return self.total

    def settle(self, used: bool) -> None:
        """Keep the reference and what the codec has, unless the step was not taken: then all is as before."""
        self.differences.settle(used)
        if self._before is not None and not used:
            self.own, self.total = self._before
        self._before = None

    def set_step(self, step: int) -> None:
        """Go on as after so many steps, from references that were loaded: their sum is taken again."""
        self.differences.set_step(step)
        self.total = self.own.clone()
        dist.all_reduce(self.total, group=self.group.handle)

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The states that have an element for each value, live."""
        yield from self.differences.kept()
        yield OWN_REFERENCE, self.own

    def factor_pieces(self, owner: bool, where: str = "0") -> Iterator[TensorPiece]:
        """The factor that the codec's next message begins with, live."""
        yield from self.differences.factor_pieces(owner, where)


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
