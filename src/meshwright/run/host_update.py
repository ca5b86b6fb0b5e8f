"""Updates by the host's processor (ZeRO-Offload, Ren et al. 2101.06840): masters and moments of some layers lie in the
host's memory, gradients are copied there, and updated parameters back.

A layer's gradient leaves as soon as it is whole; its parameters return while the processor updates the next layer. What
has arrived waits for the norm of all, so that the host keeps the gradients of all these layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from meshwright.plan.facets.offload import HOST, Offload
from meshwright.run.host_memory import Copied, HostLink


class HostMaster:
    """The copy of a bucket's parameters that the host updates: ``master`` and ``gradient`` [width] in its memory."""

    def __init__(self, mine: torch.Tensor, masters: torch.dtype, grads: torch.dtype, link: HostLink, said: dict):
        """`mine` are the parameters on the device that this rank updates; `said` is what a recorder is told."""
        self.link, self.mine, self.said = link, mine, said
        self.master = link.pinned(mine.numel(), masters)
        self.master.copy_(mine)
        self.gradient = link.pinned(mine.numel(), grads)
        #: What returns to the device, in its type; of a processor core the master itself.
        self.cast = self.master if masters == mine.dtype else link.pinned(mine.numel(), mine.dtype)
        self._out: Copied | None = None
        self._back: Copied | None = None

    def leave(self, gradient: torch.Tensor) -> None:
        """Begin to copy the gradient to the host, once in a step."""
        if self._out is None:
            self._out = self.link.copy(self.gradient, gradient, "d2h", **self.said)

    def arrived(self) -> None:
        """Wait until the host has the gradient."""
        assert self._out is not None
        self._out.wait()
        self._out = None

    def send(self) -> None:
        """Begin to copy updated parameters to the device."""
        if self.cast is not self.master:
            self.cast.copy_(self.master)
        self._back = self.link.copy(self.mine, self.cast, "h2d", **self.said)

    def settle(self) -> None:
        """Have what the device computes from now on wait for the updated parameters."""
        if self._back is None:
            self.send()  # a checkpoint was read into the master
        self._back.result()
        self._back = None

    def forget(self) -> None:
        """The gradient is not used: a step was lost."""
        if self._out is not None:
            self._out.result()
            self._out = None


class _Exchange(Protocol):
    """Parameters that are exchanged together, and where their masters lie."""

    host: HostMaster | None

    def held(self): ...


class HostUpdates:
    """The held pieces that the host updates, bucket by bucket; the duties of
    :class:`~meshwright.run.moments.Moments`, whose moments are always at hand here."""

    def __init__(self, exchanges: Sequence[_Exchange]):
        """`exchanges` are all of a rank, in the order of its held pieces."""
        self.groups: list[tuple[HostMaster, range]] = []
        at = 0
        for exchange in exchanges:
            count = sum(1 for _ in exchange.held())
            if exchange.host is not None:
                self.groups.append((exchange.host, range(at, at + count)))
            at += count
        #: Numbers of held pieces that are updated here.
        self.away = frozenset(i for _, some in self.groups for i in some)
        #: Moments are kept beside the masters.
        self.absent: frozenset[int] = frozenset()

    def each(self, update: Callable[[dict[int, dict[str, torch.Tensor]]], None]) -> None:
        """Call `update` with the numbers of one bucket's pieces after the other."""
        for host, some in self.groups:
            host.arrived()
            update({number: {} for number in some})
            host.send()

    def taken(self) -> dict[int, dict[str, torch.Tensor]]:
        """Nothing: moments are live in memory."""
        return {}

    def put(self) -> None:
        """Nothing was taken out."""


def by_host(offload: Offload, segment: int, segments: int) -> bool:
    """Whether the host updates a segment of a stage that has so many."""
    return offload.optimizer == HOST and segment < offload.moved("optimizer", segments)
