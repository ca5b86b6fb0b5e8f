"""The attention core of one block, forward and backward, with the logarithm of its softmax sums.

That logarithm is what lets blocks be merged (online softmax, Milakov & Gimelshein 1805.02867), and given the merged one
the backward of a block needs no other block (FlashAttention-2, Dao 2307.08691). The kernels are torch's own: flash on
a GPU in 16 bits and on the CPU, memory-efficient on a GPU where there is a mask or fp32; products and a softmax where
none of them applies (fp64 on a GPU, values of another width on the CPU).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

_ops = torch.ops.aten
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + bias) v and the logarithm of the softmax's sums.

    Args:
        q: [b, heads, n, d]; k, v: [b, kv_heads, m, d or dv], kv_heads dividing heads.
        causal: the lower triangle only; n equals m.
        bias: [n, m] of 0 and -inf, or None.

    Returns:
        [b, heads, n, dv] in q's type and [b, heads, n] in :func:`wide`; a query that sees no key has 0 and -inf.
    """
    kernel = _kernel(q, v, bias)
    if kernel == "products":
        return _products(q, k, v, causal, bias, scale)
    mask = None if bias is None else bias.expand(q.shape[0], q.shape[1], *bias.shape)
    if kernel == "cpu":
        out, sums = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    elif kernel == "flash":
        out, sums = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        k, v = _repeated(k, q), _repeated(v, q)
        out, sums = _ops._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)[:2]
        sums = sums[..., : q.shape[2]]
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
) -> Grads:
    """Return the part of a block in the gradients, given the *merged* output and sums of its queries; arguments as in
    :func:`forward`, `grad` and `out` [b, heads, n, dv], `sums` [b, heads, n]."""
    kernel = _kernel(q, v, bias)
    if kernel == "products":
        return _products_backward(grad, q, k, v, out, sums, causal, bias, scale)
    mask = None if bias is None else bias.expand(q.shape[0], q.shape[1], *bias.shape)
    if kernel == "cpu":
        dtype = q.dtype
        if dtype.itemsize == 2:
            # in 16 bits torch builds products anew for every number of queries, and keeps them all: megabytes for each
            # length that documents have
            grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
            mask = None if mask is None else mask.float()
        found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale
        )
        return Grads(*(g.to(dtype) for g in found))
    seed = torch.zeros((2,), dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    if kernel == "flash":
        return Grads(
            *_ops._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, sums, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0], scale=scale
            )
        )
    kv_heads, seed = k.shape[1], seed.to(torch.int64)
    sums = F.pad(sums, (0, -sums.shape[2] % _EFFICIENT_ROWS), value=float("inf"))
    dq, dk, dv, _ = _ops._scaled_dot_product_efficient_attention_backward(
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


def _kernel(q: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str:
    """The fastest kernel that takes these tensors."""
    if v.shape[-1] != q.shape[-1] or (q.is_cuda and q.dtype == torch.float64):
        return "products"
    if not q.is_cuda:
        return "cpu"
    narrow = q.shape[-1] <= _FLASH_HEAD and q.shape[-1] % _FLASH_STEP == 0
    half = q.dtype in (torch.bfloat16, torch.float16)
    if half and narrow and bias is None:
        return "flash"
    return "efficient" if q.shape[-1] % _FLASH_STEP == 0 else "products"


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Key-value heads once per query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] != q.shape[1] else x


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """[b, kv_heads, heads per kv head, n, m]."""
    scores = q @ k.unsqueeze(2).mT * scale
    if causal:
        n = q.shape[-2]
        scores = scores.masked_fill(torch.ones((n, n), dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return scores if bias is None else scores + bias


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[b, heads, ...] as [b, kv_heads, heads per kv head, ...], in the wide type."""
    return x.to(wide(x.dtype)).unflatten(1, (kv_heads, -1))


def _products(q, k, v, causal, bias, scale):
    dtype, kv_heads = q.dtype, k.shape[1]
    q, k, v = _grouped(q, kv_heads), k.to(wide(dtype)), v.to(wide(dtype))
    scores = _scores(q, k, causal, bias, scale)
    sums = scores.logsumexp(-1)
    shares = (scores - sums.unsqueeze(-1)).exp().nan_to_num(0.0)  # -inf minus -inf where nothing is seen
    return (shares @ v.unsqueeze(2)).flatten(1, 2).to(dtype), sums.flatten(1, 2)


def _products_backward(grad, q, k, v, out, sums, causal, bias, scale) -> Grads:
    dtype, kv_heads = q.dtype, k.shape[1]
    grad, q, out = (_grouped(x, kv_heads) for x in (grad, q, out))
    k, v = k.to(wide(dtype)), v.to(wide(dtype))
    shares = (_scores(q, k, causal, bias, scale) - sums.unflatten(1, (kv_heads, -1)).unsqueeze(-1)).exp()
    into = shares * (grad @ v.unsqueeze(2).mT - (grad * out).sum(-1, keepdim=True)) * scale
    dq = (into @ k.unsqueeze(2)).flatten(1, 2)
    return Grads(*(g.to(dtype) for g in (dq, (into.mT @ q).sum(2), (shares.mT @ grad).sum(2))))
