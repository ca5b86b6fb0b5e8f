"""Blocks made of parts with residual streams of their own (Kraken, Prabhakar et al. 2408.07802).

Each part has an attention, an MLP, norms and a stream; tensor-parallel ranks hold equally many parts whole, and a rank
alone holds all. What the MLPs of a block found is summed over all parts while the next block's attention is computed,
and each stream takes what the others' found in front of its MLP; the gradient's sum travels beside attention's backward
in the same way. Streams begin with the embedding and are summed for the head. How the sum enters a stream could not be
read in the paper: that a part's own result is not added to its stream a second time is ours.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.run.collect import copy_to, sum_over
from meshwright.run.mesh import AxisGroup
from meshwright.run.overlapped import SumUnderWay
from meshwright.run.parts import Mlp, Norm, Pass, Shared, dropped
from meshwright.run.self_attention import AttentionModule
from meshwright.spec.layers import Block


class _Begun(torch.autograd.Function):
    """A sum over the group that is started; backward the sum of the gradients is waited for."""

    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.sums = sums
        sums.append(SumUnderWay(x.clone(), group))
        return sums[-1].x

    @staticmethod
    def backward(ctx, grad):
        return ctx.sums.pop().wait(), None, None


class _Ended(torch.autograd.Function):
    """A sum over the group that is waited for; backward the sum of the gradients is started."""

    @staticmethod
    def forward(ctx, x, group, sums):
        ctx.group, ctx.sums = group, sums
        return sums.pop().wait().view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.sums.append(SumUnderWay(grad.clone(), ctx.group))
        return ctx.sums[-1].x, None, None


class _Part(nn.Module):
    """One of a block's parts: two norms, attention and MLP of a stream's width, whole on this rank."""

    def __init__(self, shared: Shared, prefix: str, block: Block, recompute: str):
        super().__init__()
        width = shared.model.hidden
        self.attention_norm, self.mlp_norm = (
            Norm(shared, prefix + name, width, block, sums=1) for name in shared.names.norms
        )
        self.attention = AttentionModule(shared, prefix, block.attention, block)
        self.attention.core.drops_core = recompute == "selective"
        self.mlp = Mlp(shared, prefix, block.mlp)


class StreamsBlock(nn.Module):
    """The parts of a block that this rank holds.

    Between blocks the hidden states are [2, parts, s, b, width]: the streams, and what their last MLPs found. The first
    block takes the embedding [s, b, width], and the last gives the sum of all streams."""

    def __init__(self, shared: Shared, layer: int, recompute: str):
        super().__init__()
        whole, tp = shared.model.block(layer), shared.tp
        self.shared, self.layer, self.recompute = shared, layer, recompute
        self.first, self.last = layer == 0, layer == shared.model.num_layers - 1
        count = whole.ways // tp.size
        #: The numbers of the parts that are here.
        self.held = range(tp.index * count, (tp.index + 1) * count)
        inside, block = _alone(shared), _one(whole)
        prefix = shared.names.layer.format(layer)
        self.parts = nn.ModuleList(_Part(inside, f"{prefix}streams.{i}.", block, recompute) for i in self.held)

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._forward, x, p, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, p)

    def _forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        group, sums = self.shared.tp, []
        found: Iterable[torch.Tensor] = ()
        if self.first:
            streams = [copy_to(x, group)] * len(self.parts)
        else:
            streams, found = x[0].unbind(0), x[1].unbind(0)
            total = _Begun.apply(torch.stack(found).sum(0), group, sums)
        mixed = [
            stream + dropped(self.shared, part.attention(part.attention_norm(stream), p), p, self._site(number, 1))
            for number, stream, part in zip(self.held, streams, self.parts, strict=True)
        ]
        if not self.first:
            total = _Ended.apply(total, group, sums)
            mixed = [stream + (total - own) for stream, own in zip(mixed, found, strict=True)]
        out = [
            dropped(self.shared, part.mlp(part.mlp_norm(stream), p), p, self._site(number, 2))
            for number, stream, part in zip(self.held, mixed, self.parts, strict=True)
        ]
        streams = torch.stack([stream + made for stream, made in zip(mixed, out, strict=True)])
        if self.last:
            return sum_over(streams.sum(0), group)
        return torch.stack((streams, torch.stack(out)))

    def _site(self, number: int, half: int) -> int:
        """The number of a place that drops, another for each part of each block."""
        return 2 * (number * self.shared.model.num_layers + self.layer) + half


def _alone(shared: Shared) -> Shared:
    """Return the arguments of modules of a rank that exchange nothing with others of its tensor-parallel group."""
    tp = shared.tp
    lone = AxisGroup(name=tp.name, ranks=(tp.ranks[tp.index],), index=0)
    mesh = msgspec.structs.replace(shared.mesh, groups=shared.mesh.groups | {"tp": lone})
    return shared._replace(mesh=mesh)


def _one(whole: Block) -> Block:
    """Return one of the equal parts of a block."""
    attention, mlp = whole.attention, whole.mlp
    heads, kv_heads = attention.heads // whole.ways, attention.kv_heads // whole.ways
    attention = msgspec.structs.replace(attention, heads=heads, kv_heads=kv_heads)
    return msgspec.structs.replace(
        whole, attention=attention, mlp=msgspec.structs.replace(mlp, ffn=mlp.ffn // whole.ways), ways=1
    )
