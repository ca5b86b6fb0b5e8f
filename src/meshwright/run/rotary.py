"""Rotary positions (Su et al. 2104.09864), as Llama pairs them: first half of a head with the second."""

from __future__ import annotations

import math

import torch

from meshwright.spec.numerics import Numerics


def frequencies(width: int, n: Numerics) -> torch.Tensor:
    """Radians a position turns each pair by: float64 [width / 2]."""
    turns = n.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if n.rope_type == "linear":
        return turns / n.rope_factor
    if n.rope_type == "llama3":
        # wavelengths beyond the trained context are stretched, short ones kept, those between blended
        wave = 2 * math.pi / turns
        low, high = n.rope_original / n.rope_low_factor, n.rope_original / n.rope_high_factor
        blend = ((n.rope_original / wave - n.rope_low_factor) / (n.rope_high_factor - n.rope_low_factor)).clamp(0, 1)
        between = (1 - blend) * turns / n.rope_factor + blend * turns
        return torch.where(wave > low, turns / n.rope_factor, torch.where(wave < high, turns, between))
    return turns


def tables(positions: torch.Tensor, width: int, n: Numerics, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [..., s, 1, width] for positions [..., s]; the sines that a first half is turned with are
    negative."""
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies(width, n).to(positions.device)
    cos, sin = (torch.cat(halves, dim=-1) for halves in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))
    return cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)


class _Turn(torch.autograd.Function):
    """x [b, s, heads, width] turned by the tables; its gradient is turned back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x * cos, x.roll(cos.shape[-1] // 2, -1), sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [b, s, heads, d] with its first ``width`` features turned by the tables [s, 1, width], or [b, s, 1, width]."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return _Turn.apply(x, cos, sin)
    return torch.cat((_Turn.apply(x[..., :width], cos, sin), x[..., width:]), dim=-1)
