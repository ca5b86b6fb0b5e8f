"""Quantisers on tensors: the codes of ``sync/codecs`` that take a few bits a value, in the same bytes.

A processor works through values in parts that stay in its cache, so that each pass over them reads no memory; a GPU
takes all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from meshwright.sync.codecs import fp8, int4, int8

#: Values of a part on a processor: 256 KiB of them in 32 bits. A multiple of every block.
PART = 1 << 16


def _parts(n: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """The first and the end of each part of n values."""
    step = PART if device.type == "cpu" else max(n, 1)
    for at in range(0, n, step):
        yield at, min(at + step, n)


def _rows(x: torch.Tensor, block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The first place and the blocks [., block] of each part of values, zeros behind the last."""
    whole = len(x) - len(x) % block
    for at, end in _parts(whole, x.device):
        yield at, x[at:end].view(-1, block)
    if whole < len(x):
        last = x.new_zeros(block)
        last[: len(x) - whole] = x[whole:]
        yield whole, last.view(1, block)


def _scaled(
    x: torch.Tensor, block: int, largest: float, put: Callable[[int, torch.Tensor], None], scales: torch.Tensor
) -> None:
    """Divide every block by its scale, which is its largest magnitude over `largest`, and `put` the parts."""
    x = x.to(torch.float32)
    room = torch.empty(min(len(x) + block, PART) if x.device.type == "cpu" else len(x) + block, device=x.device)
    for at, rows in _rows(x, block):
        part = room[: rows.numel()].view_as(rows)
        scale = torch.abs(rows, out=part).amax(1) / largest
        scales[at // block : at // block + len(rows)] = scale
        torch.div(rows, torch.where(scale > 0, scale, 1.0).unsqueeze(1), out=part)
        put(at, part.view(-1))


def _room(n: int, packed: int, block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of n values packed into so many, the codes in them, and room for the scales of their blocks."""
    blocks = -(-n // block)
    wire = torch.empty(packed + 4 * blocks, dtype=torch.uint8, device=device)
    return wire, wire[:packed], torch.empty(blocks, dtype=torch.float32, device=device)


def _unscaled(
    codes: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    block: int,
    dtype: torch.dtype,
    get: Callable[[int, int], torch.Tensor],
) -> torch.Tensor:
    """Multiply what `get` reads of each part by the scales of its blocks."""
    scale = scales.clone().view(torch.float32)  # at any byte: a view needs a multiple of four
    out = torch.empty(-(-n // block) * block, device=codes.device)
    for at, end in _parts(n, codes.device):
        full = -(-(end - at) // block) * block
        rows = out[at : at + full].view(-1, block)
        rows.view(-1)[: end - at] = get(at, end)
        rows.mul_(scale[at // block : at // block + len(rows)].unsqueeze(1))
    return out[:n].to(dtype)


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Encode as ``sync/codecs/int8.py`` does."""
    n = len(x)
    wire, codes, scales = _room(n, n, int8.BLOCK, x.device)
    whole = codes.view(torch.int8)

    def put(at: int, part: torch.Tensor) -> None:
        end = min(at + len(part), n)
        whole[at:end] = part.round_()[: end - at]

    _scaled(x, int8.BLOCK, 127, put, scales)
    wire[n:] = scales.view(torch.uint8)
    return wire


def from_int8(wire: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode as ``sync/codecs/int8.py`` does."""
    codes = wire[:n].view(torch.int8)
    return _unscaled(wire, wire[n:], n, int8.BLOCK, dtype, lambda at, end: codes[at:end])


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Encode as ``sync/codecs/fp8.py`` does."""
    n = len(x)
    wire, codes, scales = _room(n, n, fp8.BLOCK, x.device)
    rounded = codes.view(torch.float8_e4m3fn)

    def put(at: int, part: torch.Tensor) -> None:
        end = min(at + len(part), n)
        rounded[at:end] = part.clamp_(-fp8.LARGEST, fp8.LARGEST)[: end - at].to(torch.float8_e4m3fn)

    _scaled(x, fp8.BLOCK, fp8.LARGEST, put, scales)
    wire[n:] = scales.view(torch.uint8)
    return wire


def from_fp8(wire: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode as ``sync/codecs/fp8.py`` does. The bits of such a number are those of a half-precision one 256 times
    less, with an exponent of one bit less and seven zeros behind."""

    def get(at: int, end: int) -> torch.Tensor:
        bits = wire[at:end].to(torch.int16)
        half = ((bits & 0x7F) << 7).bitwise_or_((bits & 0x80) << 8)
        return half.view(torch.float16).to(torch.float32).mul_(256)

    return _unscaled(wire, wire[n:], n, fp8.BLOCK, dtype, get)


def to_int4(x: torch.Tensor) -> torch.Tensor:
    """Encode as ``sync/codecs/int4.py`` does."""
    n, packed = len(x), -(-len(x) // 2)
    wire, codes, scales = _room(n, packed, int4.BLOCK, x.device)

    def put(at: int, part: torch.Tensor) -> None:
        both = part.round_().add_(8).to(torch.uint8).view(torch.int16)  # the first of two in the lower byte
        end = min(at // 2 + len(both), packed)
        codes[at // 2 : end] = ((both & 15) | (both >> 4 & 0xF0))[: end - at // 2]

    _scaled(x, int4.BLOCK, 7, put, scales)
    wire[packed:] = scales.view(torch.uint8)
    return wire


def from_int4(wire: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode as ``sync/codecs/int4.py`` does."""
    packed = -(-n // 2)

    def get(at: int, end: int) -> torch.Tensor:
        both = wire[at // 2 : -(-end // 2)].to(torch.int16)
        pairs = (both & 15).bitwise_or_((both & 0xF0) << 4).view(torch.uint8)
        return pairs[: end - at].to(torch.float32).sub_(8)

    return _unscaled(wire, wire[packed:], n, int4.BLOCK, dtype, get)


#: Eight bytes of zero or one times this have them as bits of the highest byte, the first as the lowest bit.
_GATHER_BITS = 0x0102040810204080


def to_sign(x: torch.Tensor) -> torch.Tensor:
    """Encode as ``sync/codecs/sign.py`` does."""
    n, packed = len(x), -(-len(x) // 8)
    wire = torch.empty(packed + 4, dtype=torch.uint8, device=x.device)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for at, end in _parts(n, x.device):
        part = x[at:end]
        total += torch.linalg.vector_norm(part, 1)
        negative = torch.zeros(-(-(end - at) // 8) * 8, dtype=torch.uint8, device=x.device)
        negative[: end - at] = part < 0
        wire[at // 8 : -(-end // 8)] = ((negative.view(torch.int64) * _GATHER_BITS) >> 56) & 255
    wire[packed:] = (total / max(n, 1)).to(torch.float32).view(1).view(torch.uint8)
    return wire


def from_sign(wire: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode as ``sync/codecs/sign.py`` does."""
    byte = torch.arange(256, device=wire.device).unsqueeze(1)
    signs = 1.0 - 2.0 * (byte >> torch.arange(8, device=wire.device) & 1)
    return _from_table(wire, signs * wire[-4:].clone().view(torch.float32), n, dtype)


def to_ternary(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Encode as ``sync/codecs/terngrad.py`` does, with random numbers of 32 bits."""
    n, packed = len(x), -(-len(x) // 4)
    wire = torch.empty(packed + 4, dtype=torch.uint8, device=x.device)
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    for at, end in _parts(n, x.device):
        largest = torch.maximum(largest, torch.linalg.vector_norm(x[at:end], float("inf")).to(torch.float32))
    draw = _draws(x.device, seed)
    scale = 2.0**32 / torch.where(largest > 0, largest, 1.0)
    for at, end in _parts(n, x.device):
        size = end - at
        part = x[at:end].to(torch.float32)
        kept = draw(size).to(torch.float32) < part.abs().mul_(scale).sub_(2.0**31)
        codes = torch.zeros(-(-size // 4) * 4, dtype=torch.uint8, device=x.device)
        codes[:size] = kept.view(torch.uint8) << (part < 0).view(torch.uint8)  # 1, or 2 for what is negative
        wire[at // 4 : -(-end // 4)] = (codes.view(torch.int32) * 0x01041040) >> 24 & 255
    wire[packed:] = largest.view(1).view(torch.uint8)
    return wire


def _draws(device: torch.device, seed: int) -> Callable[[int], torch.Tensor]:
    """Return what draws so many int32 of all values: on a processor by a generator several times as fast as torch's."""
    if device.type != "cpu":
        made = torch.Generator(device).manual_seed(seed)
        return lambda n: torch.empty(n, dtype=torch.int32, device=device).random_(-(2**31), 2**31 - 1, generator=made)
    bits = np.random.SFC64(seed)
    return lambda n: torch.from_numpy(bits.random_raw(-(-n // 2)).view(np.int32))[:n]


def from_ternary(wire: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Decode as ``sync/codecs/terngrad.py`` does."""
    byte = torch.arange(256, device=wire.device).unsqueeze(1)
    signs = torch.tensor([0.0, 1.0, -1.0, 0.0], device=wire.device)[
        byte >> torch.arange(0, 8, 2, device=wire.device) & 3
    ]
    return _from_table(wire, signs * wire[-4:].clone().view(torch.float32), n, dtype)


def _from_table(wire: torch.Tensor, table: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Read what each byte but the last four stands for in a table [256, values of a byte]: n values."""
    out = torch.empty((len(wire) - 4, table.shape[1]), device=wire.device)
    for at, end in _parts(len(out), wire.device):
        torch.index_select(table, 0, wire[at:end].to(torch.int32), out=out[at:end])
    return out.view(-1)[:n].to(dtype)
