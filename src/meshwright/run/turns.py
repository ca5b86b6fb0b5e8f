"""PieceTurns between experts' tokens and sums of gradients: a sum travels in pieces, and none begins while tokens do.

The micro-operations of Lina (Li et al. 2210.17223). Pieces wait in the order in which gradients became whole. The next
one begins where an exchange of tokens is over or another gradient is added, unless tokens are under way; tokens wait
for no piece. These are places of the program, so that all ranks of a group begin its pieces in one order. On a GPU a
piece begins behind what the kernels' stream has waited for, so that the order holds there as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import ceil

import torch
import torch.distributed as dist

from meshwright.run.record import recorder

#: Bytes of a megabyte, in which plans say how large a piece is.
MB = 1_000_000
#: Starts one piece of a sum.
Start = Callable[[], dist.Work]


class PieceTurns:
    """Pieces of at most ``most_bytes`` that wait for a turn."""

    def __init__(self, most_bytes: int):
        self.most_bytes = most_bytes
        self._waiting: deque[InPieces] = deque()
        self._tokens = 0

    def tokens_leave(self) -> None:
        """Count an exchange of tokens that begins: pieces wait until it is over."""
        self._tokens += 1

    def tokens_arrive(self) -> None:
        """Count an exchange of tokens that is over; the next piece has its turn."""
        self._tokens -= 1
        self.go()

    def add(self, sum_: InPieces) -> InPieces:
        """Put a sum behind those that wait."""
        self._waiting.append(sum_)
        self.go()
        return sum_

    def go(self) -> None:
        """Begin the next piece, if one waits and no tokens are under way."""
        if self._waiting and not self._tokens:
            self._begin()

    def finish(self, sum_: InPieces) -> None:
        """Begin everything up to the last piece of a sum."""
        while not sum_.begun:
            self._begin()

    def _begin(self) -> None:
        first = self._waiting[0]
        first.begin()
        if first.begun:
            self._waiting.popleft()


class InPieces:
    """A sum in pieces, in the order in which they are begun: a span of the recorder from the first to the last."""

    def __init__(self, turns: PieceTurns, starts: Iterator[Start], count: int, **said: object):
        self._turns, self._starts, self._left, self._said = turns, starts, count, said
        self._works: list[dist.Work] = []
        self._token = -1

    @property
    def begun(self) -> bool:
        """Whether all pieces are begun."""
        return not self._left

    def begin(self) -> None:
        """Begin the next piece."""
        if not self._works:
            self._token = recorder().start(queue="dp", **self._said)
        self._works.append(next(self._starts)())
        self._left -= 1
        if self.begun:
            recorder().watch(self._works[-1], self._token)

    def wait(self) -> None:
        """Wait until all pieces are summed; those that have had no turn begin."""
        self._turns.finish(self)
        for work in self._works:
            work.wait()


def in_pieces(values: torch.Tensor, most_bytes: int) -> list[slice]:
    """Return slices along the last dim [..., n], of so many bytes together at most, as equal as they can be."""
    count = min(max(1, ceil(values.nbytes / most_bytes)), values.shape[-1])
    edges = [values.shape[-1] * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
