"""Collectives with gradients: what moves between the regions of a layer, and what moves back.

Every function takes a :class:`~meshwright.run.mesh.AxisGroup` and does nothing when the group is one rank. Each call
is a span of the recorder on the group's queue. The pairs are those of Megatron-LM (Shoeybi et al. 1909.08053; with
sequence parallelism Korthikanti et al. 2205.05198): the gradient of a gather is a reduce-scatter, of a copy an
all-reduce.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder
from meshwright.run.turns import InPieces, PieceTurns, in_pieces

# named differently from torch 2.13 on; the old names warn there
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: torch.Tensor, group: AxisGroup, *, queue: str = "tp") -> torch.Tensor:
    """The shards [n, ...] of every rank of the group, one below the other: [n * size, ...]. No gradient."""
    if group.alone:
        return x
    out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    with recorder().span("all_gather", queue):
        all_gather_single(out, x.contiguous(), group=group.handle)
    return out


def reduce_scatter(x: torch.Tensor, group: AxisGroup, *, queue: str = "tp") -> torch.Tensor:
    """This rank's shard [n / size, ...] of the sum over the group. No gradient."""
    if group.alone:
        return x
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    with recorder().span("reduce_scatter", queue):
        reduce_scatter_single(out, x.contiguous(), group=group.handle)
    return out


def all_reduce(
    x: torch.Tensor, group: AxisGroup, *, queue: str = "tp", op: dist.ReduceOp = dist.ReduceOp.SUM
) -> torch.Tensor:
    """`x` becomes its sum over the group, in place. No gradient."""
    if not group.alone:
        with recorder().span("all_reduce", queue):
            dist.all_reduce(x, op=op, group=group.handle)
    return x


def gather_async(out: torch.Tensor, shard: torch.Tensor, group: AxisGroup) -> dist.Work:
    """Start filling `out` [n * size] with every rank's `shard` [n]."""
    return all_gather_single(out, shard, group=group.handle, async_op=True)


def reduce_scatter_async(out: torch.Tensor, whole: torch.Tensor, group: AxisGroup) -> dist.Work:
    """Start summing `whole` [n * size] over the group into each rank's `out` [n]."""
    return reduce_scatter_single(out, whole, group=group.handle, async_op=True)


def summed(turns: PieceTurns, whole: torch.Tensor, over: AxisGroup, **said: object) -> InPieces:
    """Start summing `whole` [n] over a group, in place."""
    some = in_pieces(whole, turns.most_bytes)
    starts = (partial(dist.all_reduce, whole[one], group=over.handle, async_op=True) for one in some)
    return turns.add(InPieces(turns, starts, len(some), kind="all_reduce", **said))


def scattered(turns: PieceTurns, whole: torch.Tensor, out: torch.Tensor, over: AxisGroup, **said: object) -> InPieces:
    """Start summing `whole` [size * n] over a group into each rank's `out` [n]."""
    rows = whole.view(over.size, -1)
    some = in_pieces(rows, turns.most_bytes)
    starts = (partial(reduce_scatter_async, out[one], rows[:, one].contiguous().view(-1), over) for one in some)
    return turns.add(InPieces(turns, starts, len(some), kind="reduce_scatter", **said))


class _Sum(torch.autograd.Function):
    """All-reduce forward, nothing backward: partial results become whole ones."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Copy(torch.autograd.Function):
    """Nothing forward, all-reduce backward: a whole input enters a region where every rank does a part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.clone(), ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.group), None


class _Part(torch.autograd.Function):
    """A rank's part of what all hold alike forward, gather backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(group.size)[group.index].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.group), None


class _Whole(torch.autograd.Function):
    """Gather forward; backward a rank's part of a gradient that all hold alike."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size)[ctx.group.index].contiguous(), None


def part_of(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """This rank's rows of `x` [n, ...], which every rank of the group holds alike; n divides by the group."""
    return _Part.apply(x, group)


def whole_of(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """The parts of all ranks [n, ...] one below the other, for what every rank then does alike."""
    return _Whole.apply(x, group)


def sum_over(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Partial `x` summed over the group; the gradient passes as it is."""
    return x if group.alone else _Sum.apply(x, group)


def copy_to(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """`x` as it is; its gradient, a part on every rank, is summed over the group."""
    return x if group.alone else _Copy.apply(x, group)


def gather_dim(x: torch.Tensor, group: AxisGroup, dim: int = 1) -> torch.Tensor:
    """Shards along `dim` put together; the gradient is summed and cut."""
    if group.alone:
        return x
    return _Gather.apply(x.transpose(0, dim).contiguous(), group).transpose(0, dim)


def scatter_dim(x: torch.Tensor, group: AxisGroup, dim: int = 1) -> torch.Tensor:
    """Partial `x` summed, each rank keeping its shard along `dim`; the gradient is gathered."""
    if group.alone:
        return x
    return _Scatter.apply(x.transpose(0, dim).contiguous(), group).transpose(0, dim)
