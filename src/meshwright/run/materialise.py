"""Hot experts on every rank: their weights are sent by their own ranks for a pass, their gradients are summed back.

Fully sharded sparse data parallelism (Hecate, 2502.02581): an expert and the state of its optimizer stay on the rank
that owns them; the most chosen ones are there for all ranks of an expert-parallel group while a layer runs, so that
their tokens travel nowhere. The sparse collectives are one broadcast from, and one sum to, each rank that owns some.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder


class HotExperts:
    """The hot experts of one mixture. ``slots`` are their places among all experts in the order in which these lie on
    ranks, ascending; every rank of the group `ep` owns `local` of those places."""

    def __init__(self, slots: list[int], local: int, ep: AxisGroup):
        self.slots, self.ep = slots, ep
        #: For every rank that owns some: the rank, which of its experts these are, and the first of them among the hot.
        self.owned: list[tuple[int, list[int], int]] = []
        for rank in range(ep.size):
            mine = [slot - rank * local for slot in slots if rank * local <= slot < (rank + 1) * local]
            if mine:
                first = sum(len(one) for _, one, _ in self.owned)
                self.owned.append((rank, mine, first))

    def begin(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Start sending this rank's hot experts of each of `weights` [local experts, ...] and receiving the others';
        what comes back, [hot experts, ...] of each, is there after :meth:`end`."""
        return _Gathered.apply(self, *weights)

    def end(self, *gathered: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Wait for what was begun."""
        return _Arrived.apply(self, *gathered)

    def send(self, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Start the broadcasts of every owner."""
        out = tuple(w.new_empty((len(self.slots), *w.shape[1:])) for w in weights)
        self.works = []
        for rank, mine, first in self.owned:
            for whole, w in zip(out, weights):
                some = whole[first : first + len(mine)]
                if rank == self.ep.index:
                    some.copy_(w[mine])
                token = recorder().start("broadcast", "ep")
                work = dist.broadcast(some, self.ep.ranks[rank], group=self.ep.handle, async_op=True)
                recorder().watch(work, token)
                self.works.append(work)
        return out

    def sum_back(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Start the sums of what every rank computed to the owners."""
        self.summed, self.works = tuple(g.contiguous().clone() for g in gradients), []
        for rank, mine, first in self.owned:
            for whole in self.summed:
                some = whole[first : first + len(mine)]
                token = recorder().start("reduce", "ep")
                work = dist.reduce(some, self.ep.ranks[rank], group=self.ep.handle, async_op=True)
                recorder().watch(work, token)
                self.works.append(work)

    def wait(self) -> None:
        """Wait until all of them are over."""
        for work in self.works:
            work.wait()
        self.works = []

    def kept(self, local: int) -> tuple[torch.Tensor, ...]:
        """The sums of this rank's own experts, where they lie among its `local` ones; zero elsewhere."""
        out = tuple(g.new_zeros((local, *g.shape[1:])) for g in self.summed)
        for rank, mine, first in self.owned:
            if rank == self.ep.index:
                for whole, g in zip(out, self.summed):
                    whole[mine] = g[first : first + len(mine)]
        del self.summed
        return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hot, *weights):
        ctx.hot, ctx.local = hot, len(weights[0])
        return hot.send(weights)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.hot.wait()
        return None, *ctx.hot.kept(ctx.local)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hot, *gathered):
        ctx.hot = hot
        hot.wait()
        return tuple(g.view_as(g) for g in gathered)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.hot.sum_back(gradients)
        return None, *gradients


class _Once(torch.autograd.Function):
    """A weight that several products use, whose gradient reaches its sink once."""

    @staticmethod
    def forward(ctx, weight):
        ctx.sink = getattr(weight, "sink", None)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        if ctx.sink is None:
            return grad
        ctx.sink.add(grad)
        return None


def once(weight: torch.Tensor) -> torch.Tensor:
    """The weight, for several products: their gradients are added before they reach its sink."""
    return _Once.apply(weight)
