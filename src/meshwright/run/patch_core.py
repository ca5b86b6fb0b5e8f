"""Attention of ranks that share an image: keys and values of other ranks' patches, of this step or of the one before.

Waiting for them, ranks attend to all patches, as one device does. Under DistriFusion (Li et al., 2402.19481) a rank
attends to its own patch as it is, and to the others as they were a step before: what it sends travels beside the step.
Under PCPP (Zhang et al., 2412.02962) it attends to a part of its two neighbours' patches alone, those next to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.run.collect import all_gather_single
from meshwright.run.mesh import AxisGroup
from meshwright.run.self_attention import HeadsCore


class Travelling(NamedTuple):
    """Messages on their way: the ``works`` to wait for, what arrives, by rank, and what must stay until it has left."""

    works: tuple[dist.Work, ...]
    arrives: dict[int, torch.Tensor]
    leaves: tuple[torch.Tensor, ...]

    def landed(self) -> dict[int, torch.Tensor]:
        """Keys and values [2, b, s, heads, width] of other ranks, once they are there."""
        for work in self.works:
            work.wait()
        return self.arrives


class PatchCore:
    """The core of every layer's attention for ranks of ``cp`` that share an image. With a ``halo`` a rank sends that
    share of its patch to each neighbour; 0: all of it to all. ``sent_bytes`` counts what this rank has sent."""

    def __init__(self, cp: AxisGroup, halo: float):
        self.cp, self.halo = cp, halo
        self.stale, self.sent_bytes = False, 0
        self.before: dict[int, Travelling] = {}

    def __call__(self, core: HeadsCore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        own, key = torch.stack((k, v)), id(core)
        if self.stale:
            others = self.before[key].landed()
            self.before[key] = self._sent(own)
        else:
            now = self._sent(own)
            others = now.landed()
            self.before[key] = now._replace(works=())  # a message is waited for once
        mine = self.cp.index
        seen = torch.cat([own if rank == mine else others[rank] for rank in sorted({mine, *others})], 2)
        parts = (x.transpose(1, 2) for x in (q, *seen))
        return F.scaled_dot_product_attention(*parts, scale=core.said["scale"]).transpose(1, 2)

    def finish(self) -> None:
        """Wait for what is still on its way, which no step reads."""
        for one in self.before.values():
            one.landed()
        self.before.clear()

    def _sent(self, own: torch.Tensor) -> Travelling:
        """Send keys and values [2, b, s, heads, width] of this rank's patch to who reads them."""
        return self._to_neighbours(own) if self.halo else self._to_all(own)

    def _to_all(self, own: torch.Tensor) -> Travelling:
        cp, own = self.cp, own.contiguous()
        out = own.new_empty((cp.size * own.shape[0], *own.shape[1:]))
        work = all_gather_single(out, own, group=cp.handle, async_op=True)
        self.sent_bytes += own.nbytes * (cp.size - 1)
        return Travelling((work,), {r: x for r, x in enumerate(out.chunk(cp.size)) if r != cp.index}, (own,))

    def _to_neighbours(self, own: torch.Tensor) -> Travelling:
        cp, arrives, leaves, messages = self.cp, {}, [], []
        count = max(1, round(self.halo * own.shape[2]))
        for rank, part in ((cp.index - 1, own[:, :, :count]), (cp.index + 1, own[:, :, -count:])):
            if not 0 <= rank < cp.size:
                continue
            part = part.contiguous()
            arrives[rank] = torch.empty_like(part)
            leaves.append(part)
            messages += [(dist.isend, part, rank), (dist.irecv, arrives[rank], rank)]
            self.sent_bytes += part.nbytes
        works = dist.batch_isend_irecv([dist.P2POp(way, x, cp.ranks[rank], cp.handle) for way, x, rank in messages])
        return Travelling(tuple(works), arrives, tuple(leaves))
