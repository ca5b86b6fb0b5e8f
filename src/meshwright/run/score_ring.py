"""Ring Self-Attention (Li et al. 2105.13120): whole rows of scores on every rank, in two rings.

Keys go round, and each block gives its columns of the scores of a rank's queries; behind the softmax values go round.
The backward sends both round again for the gradients of scores and queries. Of the gradients of keys and values each
rank finds its queries' part for the whole sequence; they are summed over the ranks, as the authors do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.run import flash
from meshwright.run.collect import all_reduce
from meshwright.run.mesh import AxisGroup
from meshwright.run.ring import Moving, grad_of_sinks
from meshwright.run.visible import MaskRule


def hidden_pairs(
    count: int, group: AxisGroup, rule: MaskRule, documents: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Return which keys of the whole sequence each of a rank's `count` queries does not see, bool [b or 1, count, S];
    None where it sees all. Ranks hold consecutive pieces; `documents` is [b, S]."""
    keys = torch.arange(count * group.size, device=device)
    queries = keys[count * group.index : count * (group.index + 1)]
    away = queries[:, None] - keys
    hidden = torch.zeros_like(away, dtype=torch.bool)
    if rule.causal:
        hidden |= away < 0
    if rule.window:
        hidden |= away.abs() >= rule.window
    hidden = hidden[None]
    if documents is not None:
        mine = documents[:, count * group.index : count * (group.index + 1)]
        hidden = hidden | (mine[:, :, None] != documents[:, None])
    return hidden if rule.causal or rule.window or documents is not None else None


def by_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    hidden: torch.Tensor | None,
    group: AxisGroup,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries [b, n, heads, d] to the keys and values [b, n, kv_heads, d or dv] of all ranks
    of `group`, but for the `hidden` pairs; `cap` and `sinks` as in :func:`meshwright.run.attention.attend`.

    Returns:
        [b, n, heads, dv]
    """
    return _ScoreRing.apply(q, k, v, sinks, hidden, group, scale, cap)


def _round(x: torch.Tensor, group: AxisGroup) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the columns of every rank's tokens with what it has of them, [b, n, heads, d], this rank's first; while one
    is worked on, the next travels."""
    count = x.shape[1]
    for hop in range(group.size):
        moving = Moving.start(x, group, 1) if hop + 1 < group.size else None
        source = (group.index - hop) % group.size
        yield slice(source * count, (source + 1) * count), x
        x = moving.wait() if moving else x


def _by_kv(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[b, n, heads, d] as [b, kv_heads, heads of each * n, d], so that a product reads each key once."""
    return x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_tokens(x: torch.Tensor, count: int) -> torch.Tensor:
    """The way back: [b, count, heads, d]."""
    return x.unflatten(2, (-1, count)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Keys or values [b, m, kv_heads, d] as [b, kv_heads, m, d]."""
    return x.transpose(1, 2)


class _ScoreRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, hidden, group, scale, cap):
        count, kv_heads, wide = q.shape[1], k.shape[2], flash.wide(q.dtype)
        rows = _by_kv(q, kv_heads)
        scores = rows.new_empty((*rows.shape[:3], count * group.size))
        for columns, keys in _round(k.contiguous(), group):
            scores[..., columns] = rows @ _rows(keys).transpose(-1, -2)
        scores *= scale
        if cap:
            scores = torch.tanh(scores / cap) * cap
        each = scores.unflatten(2, (-1, count))  # [b, kv_heads, heads of each, n, S]
        masked = each if hidden is None else each.masked_fill(hidden[:, None, None], float("-inf"))
        sums = torch.logsumexp(masked.to(wide), -1)
        if sinks is not None:
            sums = torch.logaddexp(sums, sinks.to(wide).view(kv_heads, -1, 1))
        shares = torch.exp(masked.to(wide) - sums.unsqueeze(-1)).to(q.dtype).flatten(2, 3)
        out = rows.new_zeros((*rows.shape[:3], v.shape[-1]), dtype=wide)
        for columns, values in _round(v.contiguous(), group):
            out += shares[..., columns] @ _rows(values)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, shares, out, sums, scores if cap else None)
        ctx.group, ctx.scale, ctx.cap = group, scale, cap
        return _by_tokens(out, count)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, shares, out, sums, scores = ctx.saved_tensors
        group, count, kv_heads, wide = ctx.group, q.shape[1], k.shape[2], flash.wide(q.dtype)
        mine, rows = slice(group.index * count, (group.index + 1) * count), _by_kv(q, kv_heads)
        grad = _by_kv(grad, kv_heads)
        of_shares = torch.empty_like(shares)
        for columns, values in _round(v.contiguous(), group):
            of_shares[..., columns] = grad @ _rows(values).transpose(-1, -2)
        of_values = all_reduce(shares.transpose(-1, -2) @ grad, group, queue="cp")[:, :, mine]
        kept = (grad * out).sum(-1, keepdim=True, dtype=wide)
        of_scores = (shares * (of_shares - kept)).to(q.dtype)
        if ctx.cap:
            of_scores = of_scores * (1 - (scores / ctx.cap).square())
        of_scores *= ctx.scale
        of_queries = torch.zeros_like(rows, dtype=wide)
        for columns, keys in _round(k.contiguous(), group):
            of_queries += of_scores[..., columns] @ _rows(keys)
        of_keys = all_reduce(of_scores.transpose(-1, -2) @ rows, group, queue="cp")[:, :, mine]
        of_sinks = None
        if sinks is not None:
            heads = [x.unflatten(2, (-1, count)).flatten(1, 2) for x in (grad, out)]
            of_sinks = grad_of_sinks(*heads, sums.flatten(1, 2), sinks)
        back = _by_tokens(of_queries.to(q.dtype), count), of_keys.transpose(1, 2), of_values.transpose(1, 2)
        return *back, of_sinks, None, None, None, None
