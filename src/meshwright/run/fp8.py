"""Matrix products whose operands are rounded to 8-bit floating point (Micikevicius et al. 2209.05433), forward and
backward, between activations and weights that stay in 16 bits.

Every operand is scaled so that its largest magnitude is the largest number of its format, by what it holds now: a whole
matrix at once (``fp8``: E4M3 for inputs and weights, E5M2 for gradients), or each row of it as the product reads it
(``fp8_row``: E4M3 for all, by powers of two), as torchao's recipes ``tensorwise`` and ``rowwise`` do. A rank scales the
part of a matrix that it holds. What stays for the weight's gradient are codes of one byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.facets.precision import LOW
from meshwright.run.collect import all_gather, all_reduce, reduce_scatter
from meshwright.run.mesh import AxisGroup
from meshwright.spec.workload import Train

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: GPUs multiply matrices whose sides are whole numbers of this.
WHOLE = 16
#: The least magnitude that is scaled up to a format's largest.
LEAST = 1e-12
#: The compute capability of the first GPUs that multiply in 8 bits (Ada).
CAPABILITY = (8, 9)


class Format(NamedTuple):
    """How operands are rounded: the type of inputs and weights, that of gradients, and whether every row has a scale of
    its own, a power of two."""

    forward: torch.dtype
    backward: torch.dtype
    by_row: bool


FORMATS = {"fp8": Format(E4M3, E5M2, False), "fp8_row": Format(E4M3, E4M3, True)}


class Codes(NamedTuple):
    """A matrix [rows, columns] in 8 bits, padded with zeros to sides that GPUs multiply, and what its numbers are to be
    multiplied by: fp32 [1], or [rows, 1]."""

    numbers: torch.Tensor
    scale: torch.Tensor
    rows: int

    @property
    def turned(self) -> Codes:
        """The transposed matrix, of one scale."""
        return Codes(self.numbers.T.contiguous(), self.scale, 0)


def rounded(x: torch.Tensor, kind: torch.dtype, by_row: bool) -> Codes:
    """Return a matrix [rows, columns] rounded to a type of 8 bits. What is not a number stays none."""
    most = torch.finfo(kind).max
    seen = x.detach().abs()
    largest = (seen.amax(-1, keepdim=True) if by_row else seen.amax().view(1)).float()
    scale = largest.clamp(min=LEAST) / most
    if by_row:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    numbers = (x / scale).clamp(-most, most).to(kind)
    rows, columns = x.shape
    down, right = -rows % WHOLE, -columns % WHOLE
    if down or right:
        whole = numbers.new_zeros((rows + down, columns + right))
        whole[:rows, :columns] = numbers
        numbers = whole
        if by_row and down:
            scale = torch.cat((scale, scale.new_ones((down, 1))))
    return Codes(numbers, scale, rows)


def product(a: Codes, b: Codes, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``a @ b.T`` of codes [rows, k] and [columns, k], summed in fp32, as a type of 16 bits or more."""
    by_row = a.scale.dim() == 2
    how = ScalingType.RowWise if by_row else ScalingType.TensorWise
    right = b.scale.T if by_row else b.scale
    made = F.scaled_mm(a.numbers, b.numbers.T, a.scale, how, right, how, output_dtype=dtype)
    return made if made.shape == (rows, columns) else made[:rows, :columns].clone()


class _Product(torch.autograd.Function):
    """x [..., k] times weight [n, k] transposed, as rows [t, n] that others may add to in place. `enter`: x is a shard
    along dim 0 that is gathered first, and again for the weight gradient unless `keep`; else with a `group` x is whole
    and its gradient a part that is summed."""

    @staticmethod
    def forward(ctx, x, weight, how, add, group, enter, keep):
        ctx.how, ctx.add, ctx.group, ctx.enter, ctx.again = how, add, group, enter, enter and not keep
        ctx.shape = x.shape
        whole = all_gather(x, group) if enter else x
        rows = whole.reshape(-1, whole.shape[-1])
        codes = rounded(rows, how.forward, how.by_row)
        out = product(codes, rounded(weight, how.forward, how.by_row), len(rows), len(weight), x.dtype)
        ctx.kept = None
        if ctx.needs_input_grad[1] and not ctx.again:
            ctx.kept = rounded(rows.T, how.forward, True) if how.by_row else codes.turned
        ctx.save_for_backward(x if ctx.needs_input_grad[1] and ctx.again else None, weight)
        return out

    @staticmethod
    def backward(ctx, rows):
        (x, weight), how, group = ctx.saved_tensors, ctx.how, ctx.group
        n, k = weight.shape
        codes = rounded(rows, how.backward, how.by_row)
        back = None
        if ctx.needs_input_grad[0]:
            back = product(codes, rounded(weight.T, how.forward, how.by_row), len(rows), k, rows.dtype)
            if ctx.enter:
                back = reduce_scatter(back, group)
            elif group is not None:
                back = all_reduce(back, group)
            back = back.view(ctx.shape)
        if not ctx.needs_input_grad[1]:
            return (back, *(None,) * 6)
        left = rounded(rows.T, how.backward, True) if how.by_row else codes.turned
        kept, ctx.kept = ctx.kept, None

        def gradient() -> torch.Tensor:
            right = kept
            if right is None:
                again = all_gather(x, group)
                right = rounded(again.reshape(-1, k).T, how.forward, how.by_row)
            return product(left, right, n, k, weight.dtype)

        return back, ctx.add(getattr(weight, "sink", None), gradient), *(None,) * 5


class _Grouped(torch.autograd.Function):
    """Rows of x in consecutive groups, each times its own matrix of weight [groups, n, k]."""

    @staticmethod
    def forward(ctx, x, weight, how, add, groups):
        ctx.how, ctx.add, ctx.groups, ctx.kept = how, add, groups, []
        n = weight.shape[1]
        out = x.new_empty((len(x), n))
        for i, rows in groups:
            codes = rounded(x[rows], how.forward, how.by_row)
            out[rows] = product(codes, rounded(weight[i], how.forward, how.by_row), codes.rows, n, x.dtype)
            if ctx.needs_input_grad[1]:
                ctx.kept.append(rounded(x[rows].T, how.forward, True) if how.by_row else codes.turned)
        ctx.save_for_backward(weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        (weight,), how, groups, kept = ctx.saved_tensors, ctx.how, ctx.groups, ctx.kept
        n, k = weight.shape[1:]
        back, left = grad.new_empty((len(grad), k)), []
        for i, rows in groups:
            codes = rounded(grad[rows], how.backward, how.by_row)
            back[rows] = product(codes, rounded(weight[i].T, how.forward, how.by_row), codes.rows, k, grad.dtype)
            if kept:
                left.append(rounded(grad[rows].T, how.backward, True) if how.by_row else codes.turned)
        ctx.kept = None
        if not ctx.needs_input_grad[1]:
            return (back, *(None,) * 4)

        def gradient() -> torch.Tensor:
            out = torch.zeros_like(weight)
            for (i, _), a, b in zip(groups, left, kept):
                out[i] = product(a, b, n, k, weight.dtype)
            return out

        return back, ctx.add(getattr(weight, "sink", None), gradient), None, None, None


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    word: str,
    add: Callable[..., torch.Tensor | None],
    groups: list[tuple[int, slice]],
) -> torch.Tensor:
    """Return the rows of x [t, k] in `groups`, (number, rows) of those that have any, each times its own weight
    [groups, n, k] transposed: [t, n]. As :func:`scaled_product`; every group has a scale of its own."""
    return _Grouped.apply(x, weight, FORMATS[word], add, groups)


def scaled_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    word: str,
    add: Callable[..., torch.Tensor | None],
    group: AxisGroup | None = None,
    *,
    enter: bool = False,
    keep: bool = False,
) -> torch.Tensor:
    """Return ``x @ weight.T`` for x [..., k] and weight [n, k] with operands rounded as a `word` of :data:`FORMATS`
    says. `add` is given the weight's sink and a function that computes its gradient."""
    made = _Product.apply(x, weight, FORMATS[word], add, group, enter, keep)
    return made.view(-1, *x.shape[1:-1], len(weight))


def word_of(plan: Plan, train: Train | None) -> str:
    """Return the word of :data:`FORMATS` for the products of a plan's layers, "" where they are of 16 bits or more."""
    word = plan.precision.compute or (train.dtype if train is not None else "")
    return word if word in LOW else ""


def needed(word: str, device: torch.device) -> None:
    """Refuse a plan whose products a device does not have.

    Raises:
        MeshwrightError: L011.
    """
    if not word or device.type == "cpu":
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise MeshwrightError.one(
            "L011",
            f"{word} multiplies 8-bit floating point, which {name} does not",
            place=f"precision.compute = {word}",
            help="say bf16, or take a GPU of Ada, Hopper or Blackwell (or a processor, which imitates it slowly)",
        )
