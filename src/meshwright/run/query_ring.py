"""Rings in which queries travel, and keys and values stay where they are.

BurstAttention (Sun et al. 2403.09347) passes keys and values round forward and queries backward: what a block of them
needs is they, the gradients of their outputs and two numbers a row, and the gradient that follows them is one tensor,
not two. TokenRing (2412.20501) passes queries round in both directions of a step: on links that carry both ways what
was found for a block returns straight to where its queries are from, while the next queries arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.run import flash
from meshwright.run.mesh import AxisGroup
from meshwright.run.ring import GradientSum, Hops, Merged, Moving, around_keys, attend_back, attend_block, grad_of_sinks
from meshwright.run.visible import MaskBlock


def by_queries(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    hops: Hops,
    queries: Hops,
    group: AxisGroup,
    scale: float,
    returned: bool,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys and values of all ranks of `group`; arguments as those of
    :func:`meshwright.run.ring.blockwise`.

    Args:
        queries: ``blocks[s]`` is the work of this rank's keys and values on the queries of the rank `s` places before.
        returned: queries go round forward too, and results return to them; else keys and values do.

    Returns:
        [b, n, heads, dv]
    """
    return _QueryRing.apply(q, k, v, sinks, hops, queries, group, scale, returned)


class _QueryRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, hops, queries, group, scale, returned):
        merged = _results(q, k, v, queries, group, scale) if returned else around_keys(q, k, v, hops, group, scale)
        out, sums = merged.finish(sinks)
        ctx.save_for_backward(q, k, v, sinks, out, sums)
        ctx.said = queries, group, scale, returned
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, out, sums = ctx.saved_tensors
        queries, group, scale, returned = ctx.said
        grad, last = grad.transpose(1, 2), len(queries.blocks) - 1
        delta = (grad * out).sum(-1, dtype=sums.dtype)
        travelling = [q, grad.contiguous(), sums, delta]
        moved = _packed(travelling)
        total_k, total_v, mine = GradientSum(k), GradientSum(v), GradientSum(q)
        coming: Moving | None = None
        for step, found in enumerate(queries.blocks):
            moving = Moving.start(moved, group, 1) if step < last else None
            theirs, back, their_sums, their_delta = _unpacked(moved, travelling)
            stand_in, total_q = _alike(back, their_delta), GradientSum(q)
            for block in found:
                part = attend_back(block, back, theirs, k, v, stand_in, their_sums, queries, scale)
                total_q.add(block, block.q0, block.q1, part.q)
                total_k.add(block, block.k0, block.k1, part.k)
                total_v.add(block, block.k0, block.k1, part.v)
            if returned:
                mine.merge(total_q.value if step == 0 else None if coming is None else coming.wait())
                coming = Moving.start(total_q.value.contiguous(), group, -step) if step else None
            else:
                # what the ranks before this one have found for these queries joins, and goes on or, at the end, home
                before = None if coming is None else coming.wait()
                wide = flash.wide(q.dtype)
                total = total_q.value if before is None else (total_q.value.to(wide) + before.to(wide)).to(q.dtype)
                if last:
                    coming = Moving.start(total.contiguous(), group, 1 if step < last else -last)
                else:
                    mine.merge(total)
            moved = moving.wait() if moving else moved
        if coming is not None:
            mine.merge(coming.wait())
        grad_sinks = None if sinks is None else grad_of_sinks(grad, out, sums, sinks)
        return mine.value, total_k.value, total_v.value, grad_sinks, None, None, None, None, None


def _results(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: Hops, group: AxisGroup, scale: float
) -> Merged:
    """Send queries round, and merge what each rank finds for this one's."""
    merged, last = Merged(q, v), len(queries.blocks) - 1
    batch, tokens, heads, _ = q.shape
    whole = MaskBlock(0, tokens, 0, tokens)
    moved, coming = q.contiguous(), None
    for step, found in enumerate(queries.blocks):
        moving = Moving.start(moved, group, 1) if step < last else None
        part = Merged(moved, v)
        for block in found:
            part.add(block, *attend_block(block, moved, k, v, queries, scale))
        if not found:  # the mask leaves these queries nothing here
            part.out = q.new_zeros((batch, heads, tokens, v.shape[-1]))
            part.sums = q.new_full((batch, heads, tokens), float("-inf"), dtype=flash.wide(q.dtype))
        out, sums = part.finish(None)
        out, like = out.contiguous(), [out, sums]
        if coming is not None:
            merged.add(whole, *_unpacked(coming.wait(), like))
            coming = None
        if step:
            coming = Moving.start(_packed([out, sums]), group, -step)
        else:
            merged.add(whole, out, sums)
        moved = moving.wait() if moving else moved
    if coming is not None:
        merged.add(whole, *_unpacked(coming.wait(), like))
    return merged


def _alike(grad: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return outputs whose products with `grad`, summed over a row, are `delta`: all that a block's backward asks of
    outputs. As multiples of the gradient they lose no digits by terms that cancel."""
    squares = (grad * grad).sum(-1, dtype=delta.dtype)
    share = torch.where(squares > 0, delta / squares.clamp_min(torch.finfo(delta.dtype).tiny), 0.0)
    return (grad.to(delta.dtype) * share.unsqueeze(-1)).to(grad.dtype)


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of several types as the bytes of one message."""
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])


def _unpacked(message: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a message, each shaped and typed as in `like`."""
    parts = message.split([x.numel() * x.element_size() for x in like])
    return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(parts, like, strict=True)]
