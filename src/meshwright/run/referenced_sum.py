"""Sums of what gradients differ from those at a reference point, in a code (Beznosikov et al. 2110.03313)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.run.coded import OWN_REFERENCE, CodedSum
from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import TensorPiece
from meshwright.sync.fragments import Fragment
from meshwright.sync.record import NO_CODEC


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
