"""Matrix products whose weight gradient is a step of its own, so that a schedule may put it elsewhere (B and W).

A weight with a ``sink`` does not get its gradient from autograd: the backward hands (weight, output gradient, input)
to the sink, at once or, while :func:`deferring`, when the schedule's W action runs the queue. This is how the zero
bubble schedules split a backward (Qi et al. 2401.10241, section 2). Weights without a sink behave as in torch.

The input of a product that enters a tensor-parallel region with sequence parallelism is kept sharded, and gathered
again for the weight gradient (Korthikanti et al. 2205.05198), or kept gathered: the plan says which, and
``layers/pieces.py`` prices it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from meshwright.run.collect import all_gather, all_reduce, reduce_scatter
from meshwright.run.mesh import AxisGroup


class Sink(Protocol):
    """An accumulator of a weight's gradient."""

    def add(self, gradient: torch.Tensor) -> None:
        """Accumulate one contribution of the weight's shape."""

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Accumulate ``left.T @ right`` of left [rows, n] and right [rows, k]."""


#: Weight gradients that wait for their W action; None while they are computed at once.
_waiting: deque[Callable[[], None]] | None = None


@contextmanager
def deferring(queue: deque[Callable[[], None]]) -> Iterator[None]:
    """Inside, weight gradients are queued instead of computed. One backward at a time, as schedules have it."""
    global _waiting
    before, _waiting = _waiting, queue
    try:
        yield
    finally:
        _waiting = before


def run_deferred(queue: deque[Callable[[], None]]) -> None:
    """Compute every queued weight gradient, in the order the backward left them."""
    with torch.no_grad():
        while queue:
            queue.popleft()()


def _now_or_later(add: Callable[[], None]) -> None:
    """Add a weight's gradient to its sink by calling `add`: now, or at W where the schedule splits the backward."""
    if _waiting is None:
        add()
    else:
        _waiting.append(add)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Product(torch.autograd.Function):
    """x [..., k] times weight [n, k] transposed. `enter`: x is a shard along dim 0 that is gathered first (sequence
    parallelism), and again for the weight gradient unless `keep`; otherwise x is whole and its gradient a part that is
    summed over the group."""

    @staticmethod
    def forward(ctx, x, weight, group, enter, keep):
        ctx.group, ctx.enter, ctx.sink = group, enter, getattr(weight, "sink", None)
        ctx.again = enter and not keep
        x = x.contiguous()  # both products read it as rows
        whole = all_gather(x, group) if enter else x
        ctx.save_for_backward(x if ctx.again else whole, weight)
        return whole @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        group, enter, sink = ctx.group, ctx.enter, ctx.sink

        def factors() -> tuple[torch.Tensor, torch.Tensor]:
            """The weight's gradient is the first transposed times the second."""
            return _rows(grad), _rows(all_gather(x, group) if ctx.again else x)

        back = None
        if ctx.needs_input_grad[0]:
            back = grad @ weight
            if enter:
                back = reduce_scatter(back, group)
            elif group is not None:
                back = all_reduce(back, group)
        if not ctx.needs_input_grad[1]:
            return back, None, None, None, None
        if sink is None:
            left, right = factors()
            return back, left.T @ right, None, None, None
        _now_or_later(lambda: sink.add_product(*factors()))
        return back, None, None, None, None


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` for x [..., k] and weight [n, k]; the weight gradient goes to the weight's sink, if any."""
    return _Product.apply(x, weight, None, False, False)


def column_parallel(
    x: torch.Tensor, weight: torch.Tensor, tp: AxisGroup, *, sequence: bool, keep: bool
) -> torch.Tensor:
    """Into a tensor-parallel region: x [s, b, k] with `sequence` sharded along dim 0, weight this rank's rows [n, k].
    `keep`: what was gathered stays for the weight gradient.

    Returns [S, b, n] of the whole sequence.
    """
    if tp.alone:
        return matmul(x, weight)
    return _Product.apply(x, weight, tp, sequence, keep)


class _Grouped(torch.autograd.Function):
    """Rows of x in consecutive groups of `counts`, each times its own matrix of weight [groups, n, k]."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.counts, ctx.sink = counts, getattr(weight, "sink", None)
        ctx.save_for_backward(x, weight)
        out = x.new_empty((x.shape[0], weight.shape[1]))
        for i, rows in _groups(counts):
            torch.mm(x[rows], weight[i].T, out=out[rows])
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        counts, sink = ctx.counts, ctx.sink

        def weight_gradient() -> torch.Tensor:
            out = torch.zeros_like(weight)
            for i, rows in _groups(counts):
                torch.mm(grad[rows].T, x[rows], out=out[i])
            return out

        back = torch.empty_like(x)
        for i, rows in _groups(counts):
            torch.mm(grad[rows], weight[i], out=back[rows])
        if sink is None:
            return back, weight_gradient(), None
        _now_or_later(lambda: sink.add(weight_gradient()))
        return back, None, None


def _groups(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for i, count in enumerate(counts):
        if count:
            yield i, slice(start, start + count)
        start += count


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """x [t, k] in consecutive groups of `counts` rows (sum t), each times its own weight [groups, n, k] transposed:
    [t, n]. The weight gradient goes to the weight's sink if it has one."""
    return _Grouped.apply(x, weight, counts)
