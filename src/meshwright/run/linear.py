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
import torch.nn.functional as F

from meshwright.run.collect import all_gather, all_reduce, reduce_scatter
from meshwright.run.fp8 import grouped_product, scaled_product
from meshwright.run.mesh import AxisGroup
from meshwright.run.tiles import gathered_product, scattered_product


class Sink(Protocol):
    """An accumulator of a weight's gradient."""

    def add(self, gradient: torch.Tensor) -> None:
        """Accumulate one contribution of the weight's shape."""

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Accumulate ``left.T @ right`` of left [rows, n] and right [rows, k]."""


#: Types of 16 bits that operands between wider tensors are cast to for one product.
CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
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


def postponed(queue: deque[Callable[[], None]]) -> bool:
    """Hand queued weight gradients over to the W action that is to compute them; False where none is waited for."""
    if _waiting is None:
        return False
    _waiting.extend(queue)
    return True


def _now_or_later(add: Callable[[], None]) -> None:
    """Add a weight's gradient to its sink by calling `add`: now, or at W where the schedule splits the backward."""
    if _waiting is None:
        add()
    else:
        _waiting.append(add)


def _added(sink: Sink | None, gradient: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """A weight's `gradient`: returned where the weight has no sink, else given to it now or at W."""
    if sink is None:
        return gradient()
    _now_or_later(lambda: sink.add(gradient()))
    return None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Product(torch.autograd.Function):
    """x [..., k] times weight [n, k] transposed, of which x is kept where the weight is trained. `enter`: x is a shard
    along dim 0 that is gathered first (sequence parallelism), and again for the weight gradient unless `keep`;
    otherwise x is whole and its gradient a part that is summed over the group. `tiles`: gathers and sums go round the
    ranks while parts of them are multiplied."""

    @staticmethod
    def forward(ctx, x, weight, group, enter, keep, tiles):
        ctx.group, ctx.enter, ctx.sink, ctx.tiles = group, enter, getattr(weight, "sink", None), tiles
        ctx.again = enter and not keep
        x = x.contiguous()  # both products read it as rows
        if enter and tiles:
            out, whole = gathered_product(x, weight, group)
        else:
            whole = all_gather(x, group) if enter else x
            out = whole @ weight.T
        kept = x if ctx.again else whole
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no input
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        group, enter = ctx.group, ctx.enter
        back = None
        if ctx.needs_input_grad[0]:
            if enter and ctx.tiles:
                back = scattered_product(grad, weight.T, group)
            else:
                back = grad @ weight
                if enter:
                    back = reduce_scatter(back, group)
                elif group is not None:
                    back = all_reduce(back, group)
        asked = ctx.needs_input_grad[1]
        left = _weight_gradient(ctx.sink, lambda: (_rows(grad), _rows(all_gather(x, group) if ctx.again else x)), asked)
        return back, left, None, None, None, None


class _Scattered(torch.autograd.Function):
    """x [S, ..., k] times weight [n, k] transposed, summed over the group and scattered along dim 0, in the steps of a
    ring; the gradient is gathered in them."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.group, ctx.sink = group, getattr(weight, "sink", None)
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return scattered_product(x, weight, group)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        back, whole = gathered_product(grad, weight.T, ctx.group)
        return back, _weight_gradient(ctx.sink, lambda: (_rows(whole), _rows(x)), ctx.needs_input_grad[1]), None


def _weight_gradient(
    sink: Sink | None, factors: Callable[[], tuple[torch.Tensor, torch.Tensor]], asked: bool
) -> torch.Tensor | None:
    """The gradient of a weight, the first of its `factors` transposed times the second: returned where it has no sink,
    else given to it now or at W."""
    if not asked:
        return None
    if sink is None:
        left, right = factors()
        return left.T @ right
    _now_or_later(lambda: sink.add_product(*factors()))
    return None


def matmul(x: torch.Tensor, weight: torch.Tensor, low: str = "") -> torch.Tensor:
    """``x @ weight.T`` for x [..., k] and weight [n, k]; the weight gradient goes to the weight's sink, if any. In
    inference a weight may be ``stored`` otherwise, and knows its product, or ``adapted`` by what some tokens add.
    `low`: the format that operands are rounded to (:mod:`.fp8`, :data:`CAST`), "" for none."""
    if low in CAST:
        return matmul(x.to(CAST[low]), weight.to(CAST[low])).to(x.dtype)
    if low:
        return scaled_product(x, weight, low, _added)
    if torch.is_inference_mode_enabled():
        stored = getattr(weight, "stored", None)
        out = F.linear(x, weight) if stored is None else stored.product(x)
        adapted = getattr(weight, "adapted", None)
        return out if adapted is None else adapted.add(out, x)
    return _Product.apply(x, weight, None, False, False, False)


def column_parallel(
    x: torch.Tensor,
    weight: torch.Tensor,
    tp: AxisGroup,
    *,
    sequence: bool,
    keep: bool,
    tiles: bool = False,
    low: str = "",
) -> torch.Tensor:
    """Into a tensor-parallel region: x [s, b, k] with `sequence` sharded along dim 0, weight this rank's rows [n, k].
    `keep`: what was gathered stays for the weight gradient. `tiles`: in the steps of a ring. `low` as of
    :func:`matmul`.

    Returns [S, b, n] of the whole sequence.
    """
    if tp.alone or (not sequence and torch.is_inference_mode_enabled()):
        return matmul(x, weight, low)
    if low:
        return scaled_product(x, weight, low, _added, tp, enter=sequence, keep=keep)
    return _Product.apply(x, weight, tp, sequence, keep, tiles)


def row_parallel(x: torch.Tensor, weight: torch.Tensor, tp: AxisGroup) -> torch.Tensor:
    """Out of a tensor-parallel region, in the steps of a ring: x [S, b, k] of this rank's columns k, weight [n, k].

    Returns [s, b, n], this rank's shard of the sum along dim 0.
    """
    return _Scattered.apply(x, weight, tp)


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
        if not ctx.needs_input_grad[1]:
            return back, None, None
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


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: list[int], low: str = "") -> torch.Tensor:
    """x [t, k] in consecutive groups of `counts` rows (sum t), each times its own weight [groups, n, k] transposed:
    [t, n]. The weight gradient goes to the weight's sink if it has one. `low` as of :func:`matmul`."""
    if low:
        return grouped_product(x, weight, low, _added, list(_groups(counts)))
    stored = getattr(weight, "stored", None)
    if stored is not None:
        return torch.cat([stored[i].product(x[rows]) for i, rows in _groups(counts)])
    return _Grouped.apply(x, weight, counts)
