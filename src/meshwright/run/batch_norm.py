"""Batch norm (Ioffe and Szegedy 2015, 1502.03167) over the images of one microbatch on one rank, and the running
statistics that held-out images are normalised by.

A step moves the running statistics once, towards the mean of those of its microbatches, so that they are the same
however a global batch is cut into microbatches of one size and dealt to replicas; of one microbatch a step it is what
torch's modules do. Each replica moves its own by what it has seen, and sends nothing while it trains: what replicas
have in common, which is saved and judged by, is the mean of theirs, and since a move is linear it is what they would
have if they had moved together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from meshwright.run.mesh import ProcessMesh
from meshwright.run.parts import Pass, Shared
from meshwright.run.pieces import PARAM, Parameter, Part, TensorPiece

#: torch's defaults: what is added to a variance, and how far a step moves running statistics.
EPS, MOMENTUM = 1e-5, 0.1
#: The names of running statistics beside a norm's weight and bias.
MEAN, VARIANCE = "running_mean", "running_var"


class BatchNorm(nn.Module):
    """A norm of every channel over the images and places of a microbatch, [b, channels, height, width]."""

    def __init__(self, shared: Shared, name: str, channels: int):
        super().__init__()

        def vector(suffix: str, init: str) -> nn.Parameter:
            return shared.make(f"{name}.{suffix}", (channels,), [_whole(f"{name}.{suffix}", channels)], init=init)

        self.name, self.weight, self.bias = name, vector("weight", "ones"), vector("bias", "zeros")
        kind = torch.promote_types(self.weight.dtype, torch.float32)
        like = {"dtype": kind, "device": self.weight.device}
        #: Mean and variance [2, channels] that this rank's images have moved, those that held-out images are normalised
        #: by, and the sum of those of the microbatches of this step so far, of which there are so many.
        self.running = torch.stack((torch.zeros(channels, **like), torch.ones(channels, **like)))
        self.common = self.running.clone()
        self.seen, self.count = torch.zeros_like(self.running), 0
        #: Whether a pass is done again for its backward, whose statistics have been counted.
        self.again = False

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        kind = self.running.dtype
        weight, bias = self.weight.to(kind), self.bias.to(kind)
        if p.step < 0:
            return F.batch_norm(x, self.common[0], self.common[1], weight, bias, eps=EPS)
        found = torch.zeros_like(self.running)
        out = F.batch_norm(x, found[0], found[1], weight, bias, True, 1.0, EPS)
        if not self.again:
            self.seen += found
            self.count += 1
        return out


def _whole(name: str, channels: int) -> Part:
    return Part(name, (channels,), (0,), (slice(None),))


@contextmanager
def counted_before(module: nn.Module) -> Iterator[None]:
    """Run a module's forward without taking its microbatch into account once more."""
    norms = [one for one in module.modules() if isinstance(one, BatchNorm)]
    for one in norms:
        one.again = True
    try:
        yield
    finally:
        for one in norms:
            one.again = False


class RunningStatistics:
    """The running statistics of all norms that a rank holds, and what replicas have in common of them."""

    def __init__(self, stages: Iterable[nn.Module], mesh: ProcessMesh, clients: bool = False):
        """`clients`: replicas are clients of a server, which keep their own until the run is over."""
        self.norms = [one for stage in stages for one in stage.modules() if isinstance(one, BatchNorm)]
        self.every, self.clients = mesh["data"], clients
        together, alike = set(mesh["data"].ranks) & set(mesh["worker"].ranks), ("self", "shard", "data")
        #: The ranks that step together with this one, and hold the same norms; peers of a swarm, which hold none, have
        #: no such group.
        self.own = next((mesh[name] for name in alike if set(mesh[name].ranks) == together), mesh["self"])
        for norm in self.norms if self.every.alone or clients else ():
            norm.common = norm.running

    def begin(self) -> None:
        """A step's passes begin."""
        for norm in self.norms:
            norm.seen.zero_()
            norm.count = 0

    def end(self) -> None:
        """Move by what the microbatches of a step that is applied have shown."""
        for norm in self.norms:
            if norm.count:
                norm.running.lerp_(norm.seen / norm.count, MOMENTUM)

    def join(self, joined: bool) -> None:
        """Have in common what replicas have seen: all of them where they are `joined`, which hold the same parameters,
        else the ranks of each that takes steps of its own; collective."""
        group = self.every if joined else self.own
        if not self.norms or self.every.alone:
            return
        flat = torch.cat([norm.running.flatten() for norm in self.norms])
        if not group.alone:
            dist.all_reduce(flat, group=group.handle)
            flat /= group.size
        for norm, part in zip(self.norms, flat.split([norm.running.numel() for norm in self.norms])):
            norm.common.copy_(part.view_as(norm.common))

    def take(self) -> None:
        """Go on from what replicas had in common, which was loaded."""
        for norm in self.norms:
            norm.running.copy_(norm.common)

    def pieces(self, apart: bool) -> Iterator[TensorPiece]:
        """Yield what replicas have in common, live, as the tensors that published weights have; `apart`: replicas take
        steps of their own."""
        first = (self.own if apart or self.clients else self.every).index == 0
        for norm in self.norms:
            for word, values in zip((MEAN, VARIANCE), norm.common):
                name = f"{norm.name}.{word}"
                about = Parameter(name, (len(values),), (_whole(name, len(values)),))
                yield TensorPiece(PARAM, about, 0, len(values), values, first)
