"""Attention over blocks of keys and values that circulate among ranks, merged by their softmax sums.

While a rank attends to one block, the next one arrives (Ring Attention, Liu et al. 2310.01889). The backward sends the
blocks round again, each followed by the gradient that the ranks it has passed have summed for it. Blocks that the mask
hides from a rank are passed on without work; once no rank needs a block that has come so far, the ring stops. A ring
of one rank is plain blockwise attention, which is what the other exchanges use too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.run import flash
from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder
from meshwright.run.visible import MaskBlock, MaskRule, hidden


class Hops(NamedTuple):
    """The work of a rank in ring attention: ``blocks[s]`` on the keys and values of the rank `s` places before it.
    ``cap``: that of the scores, 0 = none."""

    blocks: tuple[tuple[MaskBlock, ...], ...]
    rule: MaskRule
    cap: float = 0.0


def blockwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    hops: Hops,
    group: AxisGroup,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys and values of all ranks of `group`.

    Args:
        q: [b, n, heads, d]; k, v: [b, m, kv_heads, d or dv]: this rank's.
        sinks: [heads], a logit per head that joins the softmax and has no value (gpt-oss).

    Returns:
        [b, n, heads, dv]
    """
    if sinks is None and not hops.cap and _plain(hops, q.shape[1], k.shape[1]):
        width, wider = v.shape[-1], q.shape[-1] - v.shape[-1]
        v = F.pad(v, (0, wider)) if wider > 0 else v  # the fused kernels know one width
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*rows, is_causal=hops.blocks[0][0].causal, scale=scale, enable_gqa=True)
        return out[..., :width].transpose(1, 2)
    return _Blockwise.apply(q, k, v, sinks, hops, group, scale)


def _plain(hops: Hops, num_queries: int, num_keys: int) -> bool:
    """Whether all there is to do is one block over everything: torch knows the best kernel for that."""
    if len(hops.blocks) > 1 or len(hops.blocks[0]) != 1:
        return False
    block = hops.blocks[0][0]
    everything = (block.q0, block.q1, block.k0, block.k1, block.row) == (0, num_queries, 0, num_keys, None)
    return everything and block.offset is None


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, hops, group, scale):
        merged = around_keys(q, k, v, hops, group, scale)
        out, sums = merged.finish(sinks)
        ctx.save_for_backward(q, k, v, sinks, out, sums)
        ctx.hops, ctx.group, ctx.scale = hops, group, scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, out, sums = ctx.saved_tensors
        hops, group, scale, last = ctx.hops, ctx.group, ctx.scale, len(ctx.hops.blocks) - 1
        grad = grad.transpose(1, 2)
        total_q = GradientSum(q)
        packed = _pack(k, v) if last else None
        arriving = None
        for step, found in enumerate(hops.blocks):
            moving = Moving.start(packed, group, 1) if step < last else None
            keys, values = (k, v) if packed is None else _unpack(packed, k, v)
            total_k, total_v = GradientSum(k), GradientSum(v)
            for block in found:
                part = attend_back(block, grad, q, keys, values, out, sums, hops, scale)
                total_q.add(block, block.q0, block.q1, part.q)
                total_k.add(block, block.k0, block.k1, part.k)
                total_v.add(block, block.k0, block.k1, part.v)
            if last:
                # what the ranks before this one have summed for the block joins, and goes on or, at the end, home
                before = arriving.wait() if arriving else None
                message = _added(total_k.value, total_v.value, before)
                arriving = Moving.start(message, group, 1 if step < last else -last)
            packed = moving.wait() if moving else None
        grads = (total_k.value, total_v.value) if not last else _unpack(arriving.wait(), k, v)
        grad_sinks = None
        if sinks is not None:
            grad_sinks = grad_of_sinks(grad, out, sums, sinks)
        return total_q.value, *grads, grad_sinks, None, None, None


def around_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hops: Hops, group: AxisGroup, scale: float
) -> Merged:
    """Attend to the keys and values of all ranks while they go round."""
    merged = Merged(q, v)
    # one contiguous message: both travel in one transfer
    packed = _pack(k, v) if len(hops.blocks) > 1 else None
    for step, found in enumerate(hops.blocks):
        moving = Moving.start(packed, group, 1) if step + 1 < len(hops.blocks) else None
        keys, values = (k, v) if packed is None else _unpack(packed, k, v)
        for block in found:
            merged.add(block, *attend_block(block, q, keys, values, hops, scale))
        packed = moving.wait() if moving else None
    return merged


def grad_of_sinks(grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks [heads] of outputs and sums that they are part of."""
    kept = (grad * out).sum(-1, dtype=sums.dtype)
    return -((sinks.to(sums.dtype)[:, None] - sums).exp() * kept).sum((0, 2)).to(sinks.dtype)


def _rows(x: torch.Tensor, start: int, stop: int, row: int | None) -> torch.Tensor:
    """Tokens of [b, n, heads, d] as [b or 1, heads, stop - start, d]."""
    part = x[:, start:stop] if row is None else x[row : row + 1, start:stop]
    return part.transpose(1, 2)


def _bias(block: MaskBlock, q: torch.Tensor, rule: MaskRule) -> torch.Tensor | None:
    if block.offset is None:
        return None
    return hidden(block.q1 - block.q0, block.k1 - block.k0, block.offset, rule, q.dtype, q.device)


def attend_block(block: MaskBlock, q, k, v, hops: Hops, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return flash.forward(
        _rows(q, block.q0, block.q1, block.row),
        _rows(k, block.k0, block.k1, block.row),
        _rows(v, block.k0, block.k1, block.row),
        causal=block.causal,
        bias=_bias(block, q, hops.rule),
        scale=scale,
        cap=hops.cap,
    )


def attend_back(block: MaskBlock, grad, q, k, v, out, sums, hops: Hops, scale: float) -> flash.Grads:
    rows = slice(None) if block.row is None else slice(block.row, block.row + 1)
    mine = (rows, slice(None), slice(block.q0, block.q1))
    return flash.backward(
        grad[mine],
        _rows(q, block.q0, block.q1, block.row),
        _rows(k, block.k0, block.k1, block.row),
        _rows(v, block.k0, block.k1, block.row),
        out[mine],
        sums[mine].contiguous(),
        causal=block.causal,
        bias=_bias(block, q, hops.rule),
        scale=scale,
        cap=hops.cap,
    )


class Merged:
    """Output and softmax sums of this rank's queries over the blocks so far. The first block of a query is taken as it
    is; from the second on sums are kept in the wide type."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor):
        self.q, self.v = q, v
        self.out: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None
        #: Per sequence, the end of the queries that a block was for: those behind it have had none.
        self.reached = [0] * q.shape[0]

    def add(self, block: MaskBlock, out: torch.Tensor, sums: torch.Tensor) -> None:
        batch, tokens, heads, _ = self.q.shape
        rows = slice(None) if block.row is None else slice(block.row, block.row + 1)
        first = block.q0 >= max(self.reached[rows])
        self.reached[rows] = [max(r, block.q1) for r in self.reached[rows]]
        if self.out is None and out.shape[:3] == (batch, heads, tokens):
            self.out, self.sums = out, sums
            return
        wide = flash.wide(self.q.dtype)
        if self.out is None:
            self.out = self.q.new_zeros((batch, heads, tokens, self.v.shape[-1]))
            self.sums = self.q.new_full((batch, heads, tokens), float("-inf"), dtype=wide)
        mine = (rows, slice(None), slice(block.q0, block.q1))
        if first:
            self.out[mine], self.sums[mine] = out, sums
            return
        self.out = self.out.to(wide)
        before = self.sums[mine]
        both = torch.logaddexp(before, sums)
        anchor = both.masked_fill(both == float("-inf"), 0.0)  # queries that have seen no key yet
        self.out[mine] = self.out[mine] * _ratio(before, anchor) + out * _ratio(sums, anchor)
        self.sums[mine] = both

    def finish(self, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [b, heads, n, dv] in the queries' type and the sums, the sinks' share included."""
        out, sums = self.out, self.sums
        if sinks is not None:
            total = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
            out, sums = out * _ratio(sums, total), total
        return out.to(self.q.dtype), sums


def _ratio(sums: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    return (sums - anchor).exp().unsqueeze(-1)


class GradientSum:
    """The gradient of [b, n, heads, d] as parts of it come in; a part that is all of it is taken as it is."""

    def __init__(self, like: torch.Tensor):
        self.like = like
        self.parts: torch.Tensor | None = None

    def add(self, block: MaskBlock, start: int, stop: int, part: torch.Tensor) -> None:
        part = part.transpose(1, 2)
        if self.parts is None and part.shape == self.like.shape:
            self.parts = part
            return
        wide = flash.wide(self.like.dtype)
        if self.parts is None:
            self.parts = self.like.new_zeros(self.like.shape, dtype=wide)
        elif self.parts.dtype != wide:
            self.parts = self.parts.to(wide)
        rows = slice(None) if block.row is None else slice(block.row, block.row + 1)
        self.parts[rows, start:stop] += part

    def merge(self, whole: torch.Tensor | None) -> None:
        """Add a gradient of all of it, where there is one."""
        if whole is None:
            return
        if self.parts is None:
            self.parts = whole
            return
        kind = flash.wide(self.like.dtype)
        self.parts = self.parts.to(kind) + whole.to(kind)

    @property
    def value(self) -> torch.Tensor:
        """The sum in the type of what it is the gradient of."""
        return torch.zeros_like(self.like) if self.parts is None else self.parts.to(self.like.dtype)


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)


def _added(k: torch.Tensor, v: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """This rank's part and the sum so far, added in the wide type; it travels in that of the model."""
    mine = _pack(k, v)
    if before is None:
        return mine
    wide = flash.wide(mine.dtype)
    return (mine.to(wide) + before.to(wide)).to(mine.dtype)


class Moving(NamedTuple):
    """A message on its way to the rank `distance` places on, and the equal one from as far behind."""

    works: list[dist.Work]
    sent: torch.Tensor
    received: torch.Tensor

    @staticmethod
    def start(message: torch.Tensor, group: AxisGroup, distance: int) -> Moving:
        target = group.ranks[(group.index + distance) % group.size]
        source = group.ranks[(group.index - distance) % group.size]
        received = torch.empty_like(message)
        said = {"group": (group.ranks[group.index], target), "num_bytes": message.nbytes}
        token = recorder().start("send", "cp", **said)
        # started as one batch, every rank sends and receives at once: no order in which two could wait for each other
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, message, target, group=group.handle),
                dist.P2POp(dist.irecv, received, source, group=group.handle),
            ]
        )
        recorder().watch(works[-1], token)
        return Moving(works, message, received)

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received
