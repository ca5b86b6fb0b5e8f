"""Scans over a sequence that is cut across ranks, whose states are handed on (LASP, Sun et al. 2404.02882), or whose
keys and values are passed round.

Each rank holds consecutive tokens and scans them from an empty state. What its tokens would have seen of the state
before them, and what they leave of it, is linear in that state, so that only the state itself has to travel: from rank
to rank forward, its gradient the other way, one message each however long the sequence is. The convolution before a
scan needs the last tokens of the rank before.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder
from meshwright.run.ring import Moving


def last_before(x: torch.Tensor, count: int, group: AxisGroup) -> torch.Tensor:
    """The last `count` tokens [b, count, c] of the rank before, of x [b, s, c] on each; zeros on the first."""
    if group.alone:
        return x.new_zeros((x.shape[0], count, x.shape[2]))
    return _LastBefore.apply(x, count, group)


def state_before(left: torch.Tensor, made: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """The state [b, h, n, p] before this rank's tokens, which make `left` of it and add `made`: `left` are numbers
    [b, h, 1, 1] that it is multiplied by, or matrices [b, h, n, n]."""
    return torch.zeros_like(made) if group.alone else _StateBefore.apply(left, made, group)


def passed_round(block: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """The equal block of the rank before, the first rank that of the last; its gradient goes back."""
    return _PassedRound.apply(block, group)


def mine(documents: torch.Tensor | None, count: int, group: AxisGroup, before: int = 0) -> torch.Tensor | None:
    """Numbers of documents [b, before + count] of this rank's tokens and of so many before them (-1 where there are
    none), of those [b, S] of the whole sequences."""
    if documents is None:
        return None
    start = group.index * count
    return F.pad(documents, (before, 0), value=-1)[:, start : start + before + count]


class _LastBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count, group):
        ctx.shape, ctx.count, ctx.group = x.shape, count, group
        found = Moving.start(x[:, -count:].contiguous(), group, 1).wait()
        return torch.zeros_like(found) if group.index == 0 else found

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        found = Moving.start(torch.zeros_like(grad) if ctx.group.index == 0 else grad, ctx.group, -1).wait()
        back = grad.new_zeros(ctx.shape)
        back[:, -ctx.count :] = found
        return back, None, None


class _PassedRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, group):
        ctx.group = group
        return Moving.start(block.contiguous(), group, 1).wait()

    @staticmethod
    def backward(ctx, grad):
        return Moving.start(grad.contiguous(), ctx.group, -1).wait(), None


class _StateBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, made, group):
        before = _received(made, group, -1)
        _send(made + (left * before if left.shape[-1] == 1 else left @ before), group, 1)
        ctx.save_for_backward(left, before)
        ctx.group = group
        return before

    @staticmethod
    def backward(ctx, grad):
        left, before = ctx.saved_tensors
        behind = _received(grad, ctx.group, 1)  # the gradient of the state that was handed on
        scalar = left.shape[-1] == 1
        _send(grad + (left * behind if scalar else left.transpose(-1, -2) @ behind), ctx.group, -1)
        of_left = (behind * before).sum((-2, -1), keepdim=True) if scalar else behind @ before.transpose(-1, -2)
        return of_left, behind, None


def _received(like: torch.Tensor, group: AxisGroup, away: int) -> torch.Tensor:
    """Return the message that the rank so far away hands on; zeros where there is none."""
    found, at = torch.zeros_like(like, memory_format=torch.contiguous_format), group.index + away
    if 0 <= at < group.size:
        dist.recv(found, src=group.ranks[at], group=group.handle)
    return found


def _send(message: torch.Tensor, group: AxisGroup, away: int) -> None:
    at = group.index + away
    if 0 <= at < group.size:
        message = message.contiguous()
        said = {"group": (group.ranks[group.index], group.ranks[at]), "num_bytes": message.nbytes}
        with recorder().span("send", "cp", **said):
            dist.send(message, dst=group.ranks[at], group=group.handle)
