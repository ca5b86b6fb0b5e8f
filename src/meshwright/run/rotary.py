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


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [b, s, heads, d] with its first ``width`` features turned by the tables [s, width]."""
    width = cos.shape[-1]
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)
