"""Cross-entropy over a vocabulary that is split across tensor-parallel ranks (Shoeybi et al. 1909.08053, section 3)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.run.collect import all_reduce
from meshwright.run.mesh import AxisGroup


class ShardedCrossEntropy(torch.autograd.Function):
    """Loss of each token, of logits [..., n] whose columns from `first` on are here."""

    @staticmethod
    def forward(ctx, logits, targets, first, tp):
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        top = all_reduce(wide.amax(-1), tp, op=dist.ReduceOp.MAX)
        shares = torch.exp(wide - top.unsqueeze(-1))
        local = targets - first
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        chosen = wide.gather(-1, local).squeeze(-1) - top
        both = torch.stack((shares.sum(-1), torch.where(here, chosen, torch.zeros_like(chosen))))
        total, chosen = all_reduce(both, tp)
        shares /= total.unsqueeze(-1)
        ctx.save_for_backward(shares, local, here)
        ctx.dtype = logits.dtype
        return torch.log(total) - chosen

    @staticmethod
    def backward(ctx, grad):
        shares, local, here = ctx.saved_tensors
        out = shares * grad.unsqueeze(-1)
        out.scatter_add_(-1, local, -(grad * here.to(grad.dtype)).unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None


def token_losses(logits: torch.Tensor, targets: torch.Tensor, first: int, tp: AxisGroup) -> torch.Tensor:
    """Return the loss of each token, as :func:`cross_entropy` adds them up."""
    if tp.alone:
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        flat = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=-1)
        return flat.view(targets.shape)
    return ShardedCrossEntropy.apply(logits, targets, first, tp) * (targets >= 0)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, first: int, tp: AxisGroup) -> torch.Tensor:
    """Loss of all tokens together, of logits [..., n], this rank's columns from `first` on, for targets [...]; at least
    fp32. A target of -1 is none. Equal on all ranks of `tp`."""
    if tp.alone:
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-1)
    losses = ShardedCrossEntropy.apply(logits, targets, first, tp)
    return (losses * (targets >= 0)).sum()
