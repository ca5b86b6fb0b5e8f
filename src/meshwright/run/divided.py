"""Divided sums on tensors: each copy sends its values of a part to the copy that sums it, and gets the sum back.

Piece by piece: while the sums of one go out, the values of the next come in, so that links that carry both ways are
full both ways (the butterfly all-reduce of Diskin et al. 2106.10207). Sums are made in the order of the copies, so that
the bits of a result do not depend on who makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from meshwright.run.beside import Beside, begin, stream_of
from meshwright.run.mesh import AxisGroup
from meshwright.run.pieces import TensorPiece
from meshwright.run.record import recorder
from meshwright.sync.divided import bounds, pieces
from meshwright.sync.fragments import Fragment


class DividedSum:
    """The sum over a group of `length` values, of which each copy makes the part that the fragment says. Used as a
    coded sum is: :meth:`begin` starts it, :meth:`end` gives it."""

    def __init__(self, fragment: Fragment, group: AxisGroup, length: int, like: torch.Tensor):
        self.sums, self.group, self.length = fragment.sums, group, length
        self.trainers = group.size - fragment.helpers
        self.label = {"stage": fragment.units[0], "layer": fragment.units[1], "group": group.ranks}
        self.stream = stream_of(like)
        self._begun: tuple[Beside, int] | None = None

    def begin(self, values: torch.Tensor, **said: Any) -> None:
        """Start summing values [length]; `said` is added to the span."""
        token = recorder().start("all_reduce", "dp", num_bytes=values.nbytes, **self.label, **said)
        self._begun = begin(self._sum, values, self.stream), token

    def end(self) -> torch.Tensor:
        """Wait for the sum [length]."""
        (work, token), self._begun = self._begun, None
        values = work.wait()
        recorder().stop(token)
        return values

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Put the sum in place of the values, piece by piece."""
        count, mine, n = pieces(values.nbytes), self.group.index, self.group.size
        parts = bounds(self.length, self.sums)
        # where each piece of each part lies
        cuts = [[lo + (hi - lo) * piece // count for piece in range(count + 1)] for lo, hi in pairwise(parts)]
        others = [i for i in range(n) if i != mine]
        done: slice | None = None
        for piece in range(count + 1):
            messages: list[tuple[Any, torch.Tensor, int]] = []
            arrives: dict[int, torch.Tensor] = {}
            own = slice(cuts[mine][piece], cuts[mine][piece + 1]) if piece < count else slice(0, 0)
            for peer in others:  # values of this piece to those who sum them, sums of the one before to all
                theirs = slice(cuts[peer][piece], cuts[peer][piece + 1]) if piece < count else slice(0, 0)
                before = slice(cuts[peer][piece - 1], cuts[peer][piece]) if piece else slice(0, 0)
                if own.stop > own.start and peer < self.trainers:
                    arrives[peer] = torch.empty_like(values[own])
                    messages.append((dist.irecv, arrives[peer], peer))
                if before.stop > before.start:
                    messages.append((dist.irecv, values[before], peer))
                if theirs.stop > theirs.start and mine < self.trainers:
                    messages.append((dist.isend, values[theirs], peer))
                if done is not None and done.stop > done.start:
                    messages.append((dist.isend, values[done], peer))
            ranks, handle = self.group.ranks, self.group.handle
            ops = [dist.P2POp(way, tensor, ranks[peer], handle) for way, tensor, peer in messages]
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
            if arrives:
                every = [values[own] if i == mine else arrives[i] for i in range(self.trainers)]
                total = every[0].clone()
                for some in every[1:]:
                    total.add_(some)
                values[own] = total
            done = own
        return values

    def advance(self) -> None:
        """All goes by itself."""

    def set_step(self, step: int) -> None:
        """A step leaves nothing."""

    def settle(self, used: bool) -> None:
        """A step leaves nothing."""

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """No state is kept."""
        yield from ()

    def factor_pieces(self, owner: bool, where: str = "0") -> Iterator[TensorPiece]:
        """No factor is kept."""
        yield from ()
