"""Dropout whose masks do not depend on the plan: a hash of where an element is in the run, not of who computes it."""

from __future__ import annotations

import torch

# odd constants of the finaliser of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit numbers
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right of signed 64-bit numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keep_mask(
    rows: torch.Tensor, width: int, rate: float, *, seed: int, step: int, site: int, first: int = 0
) -> torch.Tensor:
    """Which of [..., width] elements stay: bool, True with probability 1 - rate.

    `rows` int64 [...] numbers the tokens of the global batch; `site` the place in the model; the elements are those of
    a vector from the one at `first` on.
    """
    start = _mix(torch.tensor([seed, step, site], dtype=torch.int64, device=rows.device) + _GOLDEN)
    key = _mix(start[0] ^ _mix(start[1] ^ start[2] * _GOLDEN) * _MIX_1)
    token = _mix(rows * _GOLDEN + key)
    feature = torch.arange(first, first + width, device=rows.device, dtype=torch.int64) * _MIX_2
    draws = _shift(_mix(token.unsqueeze(-1) + feature), 40)  # 24 bits
    return draws >= int(rate * (1 << 24))


def dropout(x: torch.Tensor, rows: torch.Tensor, rate: float, **where: int) -> torch.Tensor:
    """`x` [..., width] with elements dropped at `rate` and the others scaled by 1 / (1 - rate)."""
    if not rate:
        return x
    return x * (keep_mask(rows, x.shape[-1], rate, **where).to(x.dtype) / (1.0 - rate))
