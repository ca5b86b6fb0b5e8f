"""Rotary positions (Su et al. 2104.09864), as Llama pairs them: first half of a head with the second."""

from __future__ import annotations

import math

import torch

from meshwright.run.compiled import compiled
from meshwright.spec.architecture import Model
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
    if n.rope_type == "yarn":
        # pairs that turn often in the trained context are kept, those that never do stretched, those between blended
        low, high = (_pair(count, width, n) for count in (n.rope_beta_fast, n.rope_beta_slow))
        low, high = (math.floor(low), math.ceil(high)) if n.rope_truncate else (low, high)
        low, high = max(low, 0), min(high, width - 1)
        high = high if high != low else high + 0.001
        stretch = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return turns * (1 - stretch) + turns / n.rope_factor * stretch
    return turns


def _pair(count: float, width: int, n: Numerics) -> float:
    """The number of the pair that turns so often round within the trained context (2309.00071, section 3.2)."""
    return width * math.log(n.rope_original / (count * 2 * math.pi)) / (2 * math.log(n.rope_theta))


def tables(positions: torch.Tensor, width: int, n: Numerics, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [..., s, 1, width] for positions [..., s]; the sines that a first half is turned with are
    negative."""
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies(width, n).to(positions.device)
    cos, sin = (torch.cat(halves, dim=-1) for halves in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))
    return tuple((x * n.rope_attention).to(dtype).unsqueeze(-2) for x in (cos, sin))


def rotaries(
    positions: torch.Tensor, model: Model, dtype: torch.dtype
) -> dict[str, tuple[torch.Tensor, torch.Tensor] | None]:
    """The tables of a model's layers at these positions, as arguments of a pass: ``rotary``, and where layers that
    slide have their own ``local``."""
    rotated, numbers = [a for a in model.attentions if a.rotary], model.numerics
    if not rotated:
        return {"rotary": None}
    width = rotated[0].rope_head_dim or int(rotated[0].head_dim * numbers.rope_fraction)
    made = {"rotary": tables(positions, width, numbers, dtype)}
    if numbers.local_theta:
        made["local"] = tables(positions, width, numbers.unscaled, dtype)
    return made


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


def pairs_apart(x: torch.Tensor) -> torch.Tensor:
    """The last dimension of x with the first of each pair of neighbours in its first half, the second in the other: how
    families that turn neighbours (DeepSeek) are brought to the order of :func:`rotate`. Products of queries and keys
    in the same order are those of any order."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    turned = _turned(x[..., :width], cos, sin)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, compile: bool = False) -> torch.Tensor:
    """x [b, s, heads, d] with its first ``width`` features turned by the tables [s, 1, width], or [b, s, 1, width]; as
    one kernel where it is compiled."""
    if compile:
        return compiled(_rotated)(x, cos, sin)
    width, turn = cos.shape[-1], _turned if torch.is_inference_mode_enabled() else _Turn.apply
    if width == x.shape[-1]:
        return turn(x, cos, sin)
    return torch.cat((turn(x[..., :width], cos, sin), x[..., width:]), dim=-1)
