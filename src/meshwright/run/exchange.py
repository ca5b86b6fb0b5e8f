"""All-to-alls with gradients: rows that change places between the ranks of a group, and come back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.run.mesh import AxisGroup
from meshwright.run.record import recorder


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sent, received, queue):
        ctx.said = (group, received, sent, queue)
        return _swapped(x, group, sent, received, queue)

    @staticmethod
    def backward(ctx, grad):
        return _swapped(grad, *ctx.said), None, None, None, None


def _swapped(
    x: torch.Tensor, group: AxisGroup, sent: list[int] | None, received: list[int] | None, queue: str
) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty((x.shape[0] if received is None else sum(received), *x.shape[1:]))
    if group.turns is not None:
        group.turns.tokens_leave()
    with recorder().span("all_to_all", queue):
        dist.all_to_all_single(out, x, received, sent, group=group.handle)
    if group.turns is not None:
        group.turns.tokens_arrive()
    return out


def swap(
    x: torch.Tensor,
    group: AxisGroup,
    sent: list[int] | None = None,
    received: list[int] | None = None,
    *,
    queue: str,
) -> torch.Tensor:
    """The first ``sent[0]`` rows of x to the group's first rank, the next ``sent[1]`` to its second, and so on, for
    ``received[i]`` rows from each; equal shares when None. Gradients go back the same way."""
    return x if group.alone else _Swap.apply(x, group, sent, received, queue)
