"""Attention over one dim of a video, and the switch of the dim that ranks share.

Tokens of a video lie frame by frame. Ranks share its frames, so that blocks over the places of a frame exchange
nothing; or, under Dynamic Sequence Parallelism (Zhao et al., 2403.10266), whichever dim a block does not attend over,
and one all-to-all stands between blocks over the one and over the other.
"""

from __future__ import annotations

import torch

from meshwright.run.attention import attend
from meshwright.run.exchange import swap
from meshwright.run.mesh import AxisGroup
from meshwright.run.parts import Pass, Shared
from meshwright.run.self_attention import HeadsCore
from meshwright.spec.items import SPACE, TIME

_ALONE = AxisGroup(name="alone", ranks=(0,), index=0)


def per_frame(shared: Shared) -> int:
    """Places of a frame."""
    return shared.train.seq_len // shared.train.frames


def own_tokens(shared: Shared, over: str) -> torch.Tensor:
    """The numbers in the video of the tokens that this rank has in a block over a dim, int64 [s], in their order."""
    cp, every = shared.mesh["cp"], torch.arange(shared.train.seq_len)
    if over == TIME and shared.plan.sequence.switches:
        return every.view(shared.train.frames, cp.size, -1)[:, cp.index].flatten()
    return every.chunk(cp.size)[cp.index]


def switched(x: torch.Tensor, over: str, shared: Shared) -> torch.Tensor:
    """Hidden states [s, b, hidden] of this rank's part of a video once ranks share the other dim than that a block is
    `over`."""
    cp, frames = shared.mesh["cp"], shared.train.frames
    if over == TIME:  # from whole frames to whole places
        sent = x.unflatten(0, (frames // cp.size, cp.size, -1)).transpose(0, 1).flatten(0, 2)
        return swap(sent, cp, queue="cp")
    found = swap(x, cp, queue="cp").unflatten(0, (cp.size, frames // cp.size, -1))
    return found.transpose(0, 1).flatten(0, 2)


class DimCore(HeadsCore):
    """The core of attention over the places of each frame, or over the frames of each place."""

    def mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Pass) -> torch.Tensor:
        """[b, s, heads, width] in and out."""
        shared, over, mesh = self.shared, self.spec.over, self.shared.mesh
        cp, apart = mesh["cp"].size, shared.plan.sequence.switches
        frames = shared.train.frames // (1 if apart and over == TIME else cp)
        b, parts = q.shape[0], [x.unflatten(1, (frames, -1)) for x in (q, k, v)]
        if over == TIME:
            parts = [x.transpose(1, 2) for x in parts]
        size = parts[0].shape[1]
        parts = [x.flatten(0, 1) for x in parts]
        if over == SPACE or apart:
            out = attend(*parts, cp=_ALONE, **self.said | {"algorithm": "ring"})
        else:
            out = attend(*parts, cp=mesh["cp_outer"], inner=mesh["cp_inner"], **self.said)
        out = out.unflatten(0, (b, size))
        return (out.transpose(1, 2) if over == TIME else out).flatten(1, 2)
