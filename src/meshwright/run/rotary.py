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
    """Cosines and sines [s, width] for positions [s]."""
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies(width, n).to(positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


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
    half = cos.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    return torch.addcmul(x * cos.unsqueeze(1), swapped, signed.unsqueeze(1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [b, s, heads, d] with its first ``width`` features turned by the tables [s, width]."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return _Turn.apply(x, cos, sin)
    return torch.cat((_Turn.apply(x[..., :width], cos, sin), x[..., width:]), dim=-1)
