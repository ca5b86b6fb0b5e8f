"""The attention core of one block, forward and backward, with the logarithm of its softmax sums.

That logarithm is what lets blocks be merged (online softmax, Milakov & Gimelshein 1805.02867), and given the merged one
the backward of a block needs no other block (FlashAttention-2, Dao 2307.08691). The kernels are torch's own: flash on
a GPU in 16 bits and on the CPU, memory-efficient on a GPU where there is a mask or fp32. No public call gives the
logarithm with a gradient on every device, so that they are taken where this torch has them as they are called here;
products and a softmax, some rows of scores at a time, do the same where it has not, and where no kernel applies: fp64
on a GPU, values wider than keys, capped scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

#: Torch's own kernels, and the arguments by name with which they are called here: they are not part of its interface.
_CALLED = {
    "_scaled_dot_product_flash_attention_for_cpu": {"attn_mask", "scale"},
    "_scaled_dot_product_flash_attention_for_cpu_backward": {"attn_mask", "scale"},
    "_scaled_dot_product_flash_attention": {"scale"},
    "_scaled_dot_product_flash_attention_backward": {"scale"},
    "_scaled_dot_product_efficient_attention": {"scale"},
    "_scaled_dot_product_efficient_attention_backward": {"scale"},
}


def _found(ops: Any) -> dict[str, Any]:
    """Return those of the kernels that are in `ops` and take what they are given here."""
    there = {}
    for name, needed in _CALLED.items():
        overload = getattr(getattr(ops, name, None), "default", None)
        if overload is not None and needed <= {one.name for one in overload._schema.arguments}:
            there[name] = overload
    return there


#: The kernels that this torch has.
_OPS = _found(torch.ops.aten)
_PAIRS = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}
#: Scores that products hold at once.
_SCORES = 1 << 24
#: Widest head the flash kernel of a GPU takes, and what its width is a multiple of.
_FLASH_HEAD, _FLASH_STEP = 256, 8
#: The memory-efficient kernel pads its softmax sums to a multiple of so many queries.
_EFFICIENT_ROWS = 32


class Grads(NamedTuple):
    """Gradients of queries, keys and values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums of values of `dtype` are accumulated."""
    return dtype if dtype == torch.float64 else torch.float32


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    bias: torch.Tensor | None,
    scale: float,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + bias) v and the logarithm of the softmax's sums.

    Args:
        q: [b, heads, n, d]; k, v: [b, kv_heads, m, d or dv], kv_heads dividing heads.
        causal: the lower triangle only; n equals m.
        bias: [n, m] of 0 and -inf, or None.
        cap: > 0: scores are cap * tanh(score / cap) before the bias (Gemma 2, 2408.00118).

    Returns:
        [b, heads, n, dv] in q's type and [b, heads, n] in :func:`wide`; a query that sees no key has 0 and -inf.
    """
    kernel = _kernel(q, v, bias, cap)
    if kernel == "products":
        return _products(q, k, v, causal, bias, scale, cap)
    width, v = v.shape[-1], _widened(v, q)
    mask = None if bias is None else bias.expand(q.shape[0], q.shape[1], *bias.shape)
    if kernel == "cpu":
        attend = _OPS["_scaled_dot_product_flash_attention_for_cpu"]
        out, sums = attend(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    elif kernel == "flash":
        out, sums = _OPS["_scaled_dot_product_flash_attention"](q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        k, v = _repeated(k, q), _repeated(v, q)
        attend = _OPS["_scaled_dot_product_efficient_attention"]
        out, sums = attend(q, k, v, mask, True, 0.0, causal, scale=scale)[:2]
        sums = sums[..., : q.shape[2]]
    out = out[..., :width]
    if bias is None:
        return out, sums
    # the kernels leave queries undefined that see no key of the block
    blind = (bias == float("-inf")).all(-1)
    return out.masked_fill(blind.unsqueeze(-1), 0.0), sums.masked_fill(blind, float("-inf"))


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    *,
    causal: bool,
    bias: torch.Tensor | None,
    scale: float,
    cap: float = 0.0,
) -> Grads:
    """Return the part of a block in the gradients, given the *merged* output and sums of its queries; arguments as in
    :func:`forward`, `grad` and `out` [b, heads, n, dv], `sums` [b, heads, n]."""
    kernel = _kernel(q, v, bias, cap)
    if kernel == "products":
        return _products_backward(grad, q, k, v, out, sums, causal, bias, scale, cap)
    width = v.shape[-1]
    found = _kernel_backward(
        kernel, *(_widened(x, q) for x in (grad, out)), q, k, _widened(v, q), sums, causal, bias, scale
    )
    return found if found.v.shape[-1] == width else found._replace(v=found.v[..., :width])


def _kernel_backward(kernel, grad, out, q, k, v, sums, causal, bias, scale) -> Grads:
    """Return :func:`backward` by one of torch's kernels."""
    mask = None if bias is None else bias.expand(q.shape[0], q.shape[1], *bias.shape)
    if kernel == "cpu":
        dtype = q.dtype
        if dtype.itemsize == 2:
            # in 16 bits torch builds products anew for every number of queries, and keeps them all: megabytes for each
            # length that documents have
            grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
            mask = None if mask is None else mask.float()
        attend = _OPS["_scaled_dot_product_flash_attention_for_cpu_backward"]
        found = attend(grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale)
        return Grads(*(g.to(dtype) for g in found))
    seed = torch.zeros((2,), dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    if kernel == "flash":
        attend, lengths = _OPS["_scaled_dot_product_flash_attention_backward"], (q.shape[2], k.shape[2])
        some = (grad, q, k, v, out, sums, None, None, *lengths, 0.0, causal, seed, seed[:0])
        return Grads(*attend(*some, scale=scale))
    kv_heads, seed = k.shape[1], seed.to(torch.int64)
    sums = F.pad(sums, (0, -sums.shape[2] % _EFFICIENT_ROWS), value=float("inf"))
    dq, dk, dv, _ = _OPS["_scaled_dot_product_efficient_attention_backward"](
        grad,
        q,
        _repeated(k, q),
        _repeated(v, q),
        mask,
        out,
        sums,
        seed[0],
        seed[1],
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return Grads(dq, *(g.unflatten(1, (kv_heads, -1)).sum(2) for g in (dk, dv)))


def _kernel(q: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, cap: float) -> str:
    """The fastest kernel that takes these tensors and is there."""
    found = "products" if cap else _fastest(q, v, bias)
    if found == "products" or all(name in _OPS for name in (_PAIRS[found], f"{_PAIRS[found]}_backward")):
        return found
    return "products"


def _fastest(q: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str:
    if v.shape[-1] > q.shape[-1] or (q.is_cuda and q.dtype == torch.float64):
        return "products"
    if not q.is_cuda:
        return "cpu"
    narrow = q.shape[-1] <= _FLASH_HEAD and q.shape[-1] % _FLASH_STEP == 0
    half = q.dtype in (torch.bfloat16, torch.float16)
    if half and narrow and bias is None:
        return "flash"
    return "efficient" if q.shape[-1] % _FLASH_STEP == 0 else "products"


def _widened(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Values as wide as the queries, with zeros behind them: the kernels know one width."""
    return x if x.shape[-1] == q.shape[-1] else F.pad(x, (0, q.shape[-1] - x.shape[-1]))


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Key-value heads once per query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] != q.shape[1] else x


def _tiles(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Queries and the keys they can see, as many at a time as their scores have room for."""
    n, m = q.shape[-2], k.shape[-2]
    step = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * m))
    for at in range(0, n, step):
        end = min(n, at + step)
        yield slice(at, end), slice(0, end if causal else m)


def _scores(q, k, rows: slice, keys: slice, causal: bool, bias, scale: float, cap: float):
    """Scores [b, kv_heads, heads per kv head, rows, keys] of a tile, and what capping them multiplies their gradient
    by, None without a cap."""
    scores, slope = q[..., rows, :] @ k[..., keys, :].unsqueeze(2).mT * scale, None
    if cap:
        turned = torch.tanh(scores / cap)
        scores, slope = turned * cap, 1 - turned.square()
    if causal:
        seen = torch.arange(keys.stop, device=q.device) <= torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
    return (scores if bias is None else scores + bias[rows, keys]), slope


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[b, heads, ...] as [b, kv_heads, heads per kv head, ...], in the wide type."""
    return x.to(wide(x.dtype)).unflatten(1, (kv_heads, -1))


def _products(q, k, v, causal, bias, scale, cap):
    dtype, kv_heads = q.dtype, k.shape[1]
    tiles = list(_tiles(q, k, causal))
    q, k, v = _grouped(q, kv_heads), k.to(wide(dtype)), v.to(wide(dtype))
    outs, sums = [], []
    for rows, keys in tiles:
        scores, _ = _scores(q, k, rows, keys, causal, bias, scale, cap)
        total = scores.logsumexp(-1)
        shares = (scores - total.unsqueeze(-1)).exp().nan_to_num(0.0)  # -inf minus -inf where nothing is seen
        outs.append((shares @ v[..., keys, :].unsqueeze(2)).to(dtype))
        sums.append(total)
    out, total = (x[0] if len(x) == 1 else torch.cat(x, dim) for x, dim in ((outs, -2), (sums, -1)))
    return out.flatten(1, 2), total.flatten(1, 2)


def _products_backward(grad, q, k, v, out, sums, causal, bias, scale, cap) -> Grads:
    dtype, kv_heads = q.dtype, k.shape[1]
    tiles = list(_tiles(q, k, causal))
    grad, q, out, sums = (_grouped(x, kv_heads) for x in (grad, q, out, sums))
    k, v = k.to(wide(dtype)), v.to(wide(dtype))
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in tiles:
        scores, slope = _scores(q, k, rows, keys, causal, bias, scale, cap)
        some, keys_here = grad[..., rows, :], k[..., keys, :].unsqueeze(2)
        # a query that sees nothing has -inf both times
        shares = (scores - sums[..., rows].unsqueeze(-1)).exp().nan_to_num(0.0)
        came = some @ v[..., keys, :].unsqueeze(2).mT - (some * out[..., rows, :]).sum(-1, keepdim=True)
        into = shares * came * scale
        into = into if slope is None else into * slope
        dq.append(into @ keys_here)
        dk[..., keys, :] += (into.mT @ q[..., rows, :]).sum(2)
        dv[..., keys, :] += (shares.mT @ some).sum(2)
    whole = (dq[0] if len(dq) == 1 else torch.cat(dq, -2)).flatten(1, 2)
    return Grads(*(g.to(dtype) for g in (whole, dk, dv)))
