"""Formats of a frozen base: matrices in 4 or 8 bits with a scale for each block of a row, and back.

``nf4`` and ``nf4-dq`` are those of QLoRA (Dettmers et al. 2305.14314): the 16 numbers of appendix E, scaled by the
largest magnitude of each 64 weights in 32 bits; with double quantisation those scales, less their mean over the matrix,
are numbers of 8 bits (Dettmers et al. 2110.02861, section 1.3) times the largest of each 256. Codes lie as bitsandbytes
lays them: two in a byte, the first in the upper half. ``int4`` has a symmetric grid and a scale of 16 bits for each 128
(as GPTQ, Frantar et al. 2210.17323), ``int8`` the largest magnitude of a row as 127 (as LLM.int8, Dettmers et al.
2208.07339).

A published matrix is always quantised whole and then cut, so that what is computed does not depend on the plan.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from meshwright.spec.lora import FROZEN_BLOCKS

#: The numbers of NF4, ascending (2305.14314, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
#: Scales that share one of their own where they are quantised again.
GROUP = 256
#: Weights that are made whole at a time: what is between stays small.
TOGETHER = 1 << 22


class BaseFormat(NamedTuple):
    """``block`` weights of a row share a scale (0: all of it), and each has so many ``bits``; ``scales`` are of a type,
    and, where they are `double`, of 8 bits. The grid is that of ``table``, or of whole numbers about 0."""

    block: int
    bits: int
    scales: torch.dtype
    table: tuple[float, ...] = ()
    double: bool = False

    def width(self, columns: int) -> int:
        """Return the scales of a row of so many columns."""
        return columns // self.block if self.block else 1


FORMATS = {
    "nf4": BaseFormat(FROZEN_BLOCKS["nf4"], 4, torch.float32, NF4),
    "nf4-dq": BaseFormat(FROZEN_BLOCKS["nf4-dq"], 4, torch.uint8, NF4, double=True),
    "int4": BaseFormat(FROZEN_BLOCKS["int4"], 4, torch.float16),
    "int8": BaseFormat(FROZEN_BLOCKS["int8"], 8, torch.float32),
}


class Quantised(NamedTuple):
    """A matrix [n, k]: ``codes`` uint8 [n, k * bits / 8], ``scales`` [n, blocks of a row], and, of scales that are
    quantised again, ``second`` fp32 [groups + 1]: the scale of each 256 of them, and their mean."""

    codes: torch.Tensor
    scales: torch.Tensor
    second: torch.Tensor

    def restored(self, how: BaseFormat, dtype: torch.dtype) -> torch.Tensor:
        """The matrix that it stands for, of a type."""
        scales = self.scales
        if how.double:
            place = torch.arange(scales.numel(), device=scales.device)
            scales = twice(scales.view(-1), self.second, place).view_as(scales)
        return restore(self.codes, scales, how, dtype)


def quantise(matrix: torch.Tensor, how: BaseFormat) -> Quantised:
    """Quantise a matrix [n, k], of which k is a multiple of the format's block."""
    n, k = matrix.shape
    rows = matrix.to(torch.float32).reshape(n, how.width(k), -1)
    most = rows.abs().amax(-1)
    second = rows.new_zeros(0)
    if how.table:
        scales = most
        if how.double:
            scales, second = _again(most)
        # codes are chosen by the largest magnitude itself, as bitsandbytes has it
        middle = torch.tensor([(a + b) / 2 for a, b in zip(how.table, how.table[1:])], device=rows.device)
        codes = torch.bucketize(rows / _not_zero(most).unsqueeze(-1), middle).to(torch.uint8)
        return Quantised(packed(codes.view(n, k)), scales, second)
    if how.bits == 4:
        scales = (most * 2 / 15).to(how.scales)
        grid = (rows / _not_zero(scales.float()).unsqueeze(-1)).round_().clamp_(-8, 7) + 8
        return Quantised(packed(grid.to(torch.uint8).view(n, k)), scales, second)
    scales = most / 127
    grid = (rows / _not_zero(scales).unsqueeze(-1)).round_().clamp_(-127, 127) + 128
    return Quantised(grid.to(torch.uint8).view(n, k), scales, second)


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales > 0, scales, 1.0)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes below 16 in each byte, the first in its upper half: uint8 [n, k] as uint8 [n, k / 2]."""
    return (codes[:, ::2] << 4) | codes[:, 1::2]


@cache
def tree() -> torch.Tensor:
    """The 256 numbers of 8 bits that scales are stored as, ascending, fp32: for each power of ten from 1 down to 1e-6
    the middles of equal steps from a tenth of it to all of it, half as many at each lower power, both signs, with 0 and
    1."""
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (power - 6)).tolist()
        values += [sign * one for one in middles for sign in (1, -1)]
    return torch.tensor(sorted(values), dtype=torch.float32)


def _again(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of blocks [n, b] in 8 bits, and the scale of each 256 of them with their mean."""
    flat = scales.reshape(-1)
    mean = flat.mean()
    rest = flat - mean
    groups = -(-len(rest) // GROUP)
    room = rest.new_zeros(groups * GROUP)
    room[: len(rest)] = rest
    most = room.view(groups, GROUP).abs().amax(1)
    book = tree().to(rest.device)
    share = room.view(groups, GROUP) / _not_zero(most).unsqueeze(1)
    codes = torch.bucketize(share, (book[1:] + book[:-1]) / 2).to(torch.uint8)
    return codes.view(-1)[: len(rest)].view_as(scales), torch.cat((most, mean.view(1)))


def twice(codes: torch.Tensor, second: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The scales, fp32, that 8-bit `codes` are, at their `place` in the whole matrix."""
    return tree().to(codes.device)[codes.int()] * second[place // GROUP] + second[-1]


@cache
def _pairs(table: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Both numbers of every byte of two codes, [256, 2]; without a table those of a grid about 0."""
    numbers = torch.tensor(table or range(-8, 8), dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((numbers[byte >> 4], numbers[byte & 15]), 1)


def restore(codes: torch.Tensor, scales: torch.Tensor, how: BaseFormat, dtype: torch.dtype) -> torch.Tensor:
    """Make a matrix [n, k] of a type of its codes and its scales, fp32 or 16 bits, some rows at a time."""
    n = codes.shape[0]
    k = codes.shape[1] * 8 // how.bits
    out = torch.empty((n, k), dtype=dtype, device=codes.device)
    step = max(1, TOGETHER // k)
    for at in range(0, n, step):
        some = codes[at : at + step]
        if how.bits == 4:
            numbers = _pairs(how.table, codes.device)[some.int()].view(len(some), how.width(k), -1)
        else:
            numbers = (some.float() - 128).view(len(some), how.width(k), -1)
        out[at : at + step] = numbers.mul_(scales[at : at + step].float().unsqueeze(-1)).view(len(some), k)
    return out
