"""Layers run part by part in an order of their own, so that sums over tensor-parallel ranks travel beside kernels.

Attention and MLP of every layer are the parts. Each is computed up to its partial result, whose sum is started and
waited for as late as the next reader needs it; the backward does the same with the gradient of each part's input, and
with the gradients of its weights in between. Domino (2409.15241) cuts the batch, so that one slice's sums travel beside
another's kernels; in Ladder Residual (2501.06589) a part reads the stream before the sum of the part before it is in.
The order is the one that ``lower/rewrites`` gives the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from meshwright.run.linear import deferring, postponed, run_deferred
from meshwright.run.mesh import AxisGroup
from meshwright.run.parts import Pass
from meshwright.run.record import recorder


class LayerPart(Protocol):
    """A part of a layer: ``enter`` normalises what it reads, ``body`` gives this rank's partial result, ``land`` what
    the sum of all ranks' adds to the stream."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, hidden] of the stream to the part's input."""

    def body(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The part's input to this rank's partial result, both [s, b, hidden]."""

    def land(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        """The summed result to what is added to the stream."""


class SumUnderWay:
    """A sum over the group under way in `x`; of one rank it is there."""

    def __init__(self, x: torch.Tensor, group: AxisGroup):
        self.x, self._work = x.contiguous(), None
        if not group.alone:
            token = recorder().start("all_reduce", "tp", group=group.ranks, num_bytes=self.x.nbytes)
            self._work = dist.all_reduce(self.x, group=group.handle, async_op=True)
            recorder().watch(self._work, token)

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self.x


class _Graphs(NamedTuple):
    """The pieces of autograd's graph of one part and slice: (input, output) of each."""

    enter: tuple[torch.Tensor, torch.Tensor]
    body: tuple[torch.Tensor, torch.Tensor]


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def _back(graph: tuple[torch.Tensor, torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
    """Run one piece of graph backward and return the gradient of its input."""
    entered, out = graph
    torch.autograd.backward(out, grad)
    return entered.grad


class _Slice:
    """One slice of a microbatch on its way through the parts."""

    def __init__(self, x: torch.Tensor, p: Pass, parts: Sequence[LayerPart], group: AxisGroup, lag: int):
        self.p, self.parts, self.group, self.lag = p, parts, group, lag
        self.streams: deque[torch.Tensor] = deque([x], maxlen=lag + 1)
        self.landed = 0
        self.sums: dict[int, SumUnderWay] = {}
        self.graphs: list[_Graphs] = []
        self.landings: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reads(self, part: int) -> int:
        """The number of parts whose results are in the stream that a part reads."""
        return max(0, part - self.lag)

    def stream(self, number: int) -> torch.Tensor:
        """The stream with the results of the first `number` parts."""
        while self.landed < number:
            summed = _leaf(self.sums.pop(self.landed).wait())
            with torch.enable_grad():
                added = self.parts[self.landed].land(summed, self.p)
            self.landings.append((summed, added))
            self.streams.append(self.streams[-1] + added.detach())
            self.landed += 1
        return self.streams[number - self.landed - 1]

    def forward(self, part: int) -> None:
        """Compute a part and start its sum."""
        read = _leaf(self.stream(self.reads(part)))
        with torch.enable_grad():
            entered = self.parts[part].enter(read)
            held = _leaf(entered)
            partial = self.parts[part].body(held, self.p)
        self.graphs.append(_Graphs((read, entered), (held, partial)))
        self.sums[part] = SumUnderWay(partial.detach(), self.group)

    def begin_backward(self, grad: torch.Tensor) -> None:
        self.grad, self.level = grad, len(self.parts)

    def gradient(self, number: int) -> torch.Tensor:
        """The gradient of the stream with the results of the first `number` parts."""
        while self.level > number:
            self.level -= 1
            for part in [k for k in self.sums if self.reads(k) == self.level]:
                came = self.sums.pop(part).wait()
                self.grad = self.grad + _back(self.graphs[part].enter, came)
        return self.grad

    def backward(self, part: int) -> None:
        """Compute the gradient of a part's input, start its sum, and compute those of its weights meanwhile."""
        grad = _back(self.landings[part], self.gradient(part + 1))
        weights: deque = deque()
        with deferring(weights):
            back = _back(self.graphs[part].body, grad)
        self.sums[part] = SumUnderWay(back, self.group)
        if not postponed(weights):
            run_deferred(weights)


class _Layers(torch.autograd.Function):
    """All parts of some layers over all slices, in order."""

    @staticmethod
    def forward(ctx, x, parts, p, group, count, lag):
        slices = [
            _Slice(one.contiguous(), _rows(p, i, count), parts, group, lag)
            for i, one in enumerate(x.detach().chunk(count, 1))
        ]
        for part in range(len(parts)):
            for one in slices:
                one.forward(part)
        ctx.slices, ctx.parts = slices, len(parts)
        return torch.cat([one.stream(len(parts)) for one in slices], 1)

    @staticmethod
    def backward(ctx, grad):
        slices = ctx.slices
        for one, mine in zip(slices, grad.chunk(len(slices), 1)):
            one.begin_backward(mine.contiguous())
        for part in reversed(range(ctx.parts)):
            for one in reversed(slices):
                one.backward(part)
        return torch.cat([one.gradient(0) for one in slices], 1), None, None, None, None, None


def through(
    x: torch.Tensor, parts: Sequence[LayerPart], p: Pass, group: AxisGroup, *, count: int = 1, lag: int = 0
) -> torch.Tensor:
    """Return hidden states [s, b, hidden] behind the parts of some layers, computed in `count` slices of the batch.
    Each part reads the stream without the results of the `lag` parts before it."""
    return _Layers.apply(x, parts, p, group, count, lag)


def told(layers: nn.Module, count: int) -> None:
    """Note on every parameter of some layers that its gradient comes in `count` contributions a microbatch."""
    for parameter in layers.parameters():
        parameter.contributions = count


def _rows(p: Pass, i: int, count: int) -> Pass:
    """The arguments of one of equal slices of a microbatch's rows."""
    if count == 1:
        return p

    def cut(x: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        return None if x is None else x.chunk(count, dim)[i].contiguous()

    several = p.positions.dim() == 2  # positions in the documents of each row

    def turned(found):
        return tuple(cut(x, 0) for x in found) if found is not None and found[0].dim() == 4 else found

    return p._replace(
        tokens=cut(p.tokens, 0),
        targets=cut(p.targets, 0),
        positions=cut(p.positions, 0) if several else p.positions,
        documents=cut(p.documents, 0),
        rotary=turned(p.rotary),
        local=turned(p.local),
        rows=cut(p.rows, 1),
    )
