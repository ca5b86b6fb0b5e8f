"""Exchanges with gradients that are under way while others compute: begun in one place, waited for in another.

The backward does the same the other way round: the exchange of a gradient begins where its forward was waited for, and
is waited for where that began. So what runs between the two runs beside the exchange in both directions.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder


class Flight:
    """One exchange of rows between the ranks of a group: ``sent`` and ``received`` rows to and from each."""

    def __init__(self, group: AxisGroup, sent: list[int], received: list[int], queue: str):
        self.group, self.sent, self.received, self.queue = group, sent, received, queue
        self._works: list[dist.Work] = []

    def launch(self, x: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Start the exchange of x, `back` on the way of its gradient; return where it will arrive."""
        to, come = (self.received, self.sent) if back else (self.sent, self.received)
        out = x.new_empty((sum(come), *x.shape[1:]))
        if self.group.turns is not None:
            self.group.turns.tokens_leave()
        token = recorder().start("all_to_all", self.queue)
        work = dist.all_to_all_single(out, x.contiguous(), come, to, group=self.group.handle, async_op=True)
        recorder().watch(work, token)
        self._works.append(work)
        return out

    def wait(self) -> None:
        """Wait until the exchange that was launched last is over."""
        self._works.pop().wait()
        if self.group.turns is not None:
            self.group.turns.tokens_arrive()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flight):
        ctx.flight = flight
        return flight.launch(x, back=False)

    @staticmethod
    def backward(ctx, grad):
        ctx.flight.wait()
        return ctx.flight.returned, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flight):
        ctx.flight = flight
        flight.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.flight.returned = ctx.flight.launch(grad, back=True)
        return grad, None  # of the shape that autograd wants; what travels is the flight's


def begin(x: torch.Tensor, flight: Flight) -> torch.Tensor:
    """Start an exchange; what comes back is filled when it has been waited for (:func:`end`)."""
    return x if flight.group.alone else _Begin.apply(x, flight)


def end(x: torch.Tensor, flight: Flight) -> torch.Tensor:
    """Wait for the exchange that x is the result of."""
    return x if flight.group.alone else _End.apply(x, flight)
