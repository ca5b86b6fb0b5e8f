"""Which experts tokens choose on a rank: scores, the best groups, the best experts, and copies in their order.

Routers are those of Mixtral (2401.04088) and of Qwen2-MoE and Qwen3-MoE (2407.10671, 2505.09388): a softmax over all
experts, of which the top k keep their weights, or have them divided by their sum; and those of DeepSeek-V2 (2405.04434,
section 2.2.2), whose tokens take experts of a few groups alone, and DeepSeek-V3 (2412.19437, section 2.1.2), which
scores every expert by a sigmoid and adds a number of each for the choice alone, which no gradient changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meshwright.run.linear import matmul
from meshwright.spec.numerics import Numerics

#: What a sum of sigmoids that weights are divided by is kept from nothing with (DeepSeek-V3's published code).
_LEAST = 1e-20


class _Untrained(torch.autograd.Function):
    """Weights as they are, beside a vector that has taken part in no gradient: its own is nothing."""

    @staticmethod
    def forward(ctx, weights, vector):
        ctx.like = vector
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.zeros_like(ctx.like)


def route(
    tokens: torch.Tensor, router: torch.Tensor, top_k: int, numbers: Numerics, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(shares of all experts [t, experts], weights, experts) of each token, the last two [t, top_k]; computed in fp32,
    or fp64 where the tokens are. `bias` [experts] is added to scores for the choice, and not trained."""
    logits = matmul(tokens, router)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.sigmoid() if numbers.sigmoid else logits.softmax(-1)
    choice = (scores if bias is None else scores + bias.to(scores.dtype)).detach()
    if numbers.groups > 1:
        grouped = choice.unflatten(-1, (numbers.groups, -1))
        # of a group counts its best expert, where sigmoids score its two best
        best = grouped.topk(2, -1).values.sum(-1) if numbers.sigmoid else grouped.amax(-1)
        far = torch.ones_like(best, dtype=torch.bool).scatter_(-1, best.topk(numbers.top_groups, -1).indices, False)
        choice = grouped.masked_fill(far.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if numbers.norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + (_LEAST if numbers.sigmoid else 0.0))
    weights = weights if numbers.route_scale == 1 else weights * numbers.route_scale
    weights = weights if bias is None else _Untrained.apply(weights, bias)
    return scores / scores.sum(-1, keepdim=True) if numbers.sigmoid else scores, weights, chosen


class Sorted(NamedTuple):
    """Copies of tokens in the order of their experts: ``place`` int64 [copies] of each among all, which are ``size``,
    and ``counts`` int64 of every expert. Copies that were dropped have no place."""

    place: torch.Tensor
    counts: torch.Tensor
    size: int

    @classmethod
    def of(cls, slots: torch.Tensor, keep: torch.Tensor | None, total: int) -> Sorted:
        """Sort copies [t, k] by their slots, of which there are `total`; those to `keep` where not all are."""
        ordered, place = slots.flatten().sort(stable=True)
        if keep is not None:
            kept = keep.flatten()[place]
            ordered, place = ordered[kept], place[kept]
        # where each expert begins among them, found without asking the device how many there are
        begins = torch.arange(total + 1, device=slots.device)
        return cls(place, torch.searchsorted(ordered, begins).diff(), slots.numel())

    def restored(self, rows: torch.Tensor, top_k: int) -> torch.Tensor:
        """Rows in this order as [t, k, h]; zero where a copy was dropped."""
        if len(self.place) < self.size:
            rows = rows.new_zeros((self.size, rows.shape[1])).index_copy(0, self.place, rows)
        else:
            rows = rows[self.place.argsort()]
        return rows.unflatten(0, (-1, top_k))


def within(weights: torch.Tensor, slots: torch.Tensor, limit: int, experts: int) -> torch.Tensor:
    """Return which copies [t, k] their experts take, at most `limit` each: those of largest weight, and of equal ones
    the first."""
    flat = slots.flatten()
    order = weights.detach().flatten().argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]
    begins = torch.searchsorted(flat[order], torch.arange(experts, device=flat.device))
    number = torch.arange(len(flat), device=flat.device) - begins[flat[order]]
    keep = torch.empty(len(flat), dtype=torch.bool, device=flat.device)
    keep[order] = number < limit
    return keep.view_as(slots)
