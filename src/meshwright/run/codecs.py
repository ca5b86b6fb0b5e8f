"""Codecs on tensors: those of ``sync/codecs`` with a version of their own, and any other through host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from meshwright.sync.codecs import Codec, codec
from meshwright.sync.codecs.int8 import BLOCK


class OnTensors(NamedTuple):
    """``encode`` (values [n], seed) gives uint8 [wire bytes], ``decode`` (bytes, n, type, seed) values [n] again; the
    seed is that of codes that draw."""

    encode: Callable[[torch.Tensor, int], torch.Tensor]
    decode: Callable[[torch.Tensor, int, torch.dtype, int], torch.Tensor]


def on_tensors(text: str) -> OnTensors:
    """The codec of a name with options, for tensors on any device.

    Raises:
        MeshwrightError: Y001 when none has the name, Y002 for an option that it has not.
    """
    found = codec(text)
    if found.name not in FAST:
        return _through_host(found)
    encode, decode = FAST[found.name]
    return OnTensors(lambda x, seed: encode(x), lambda wire, n, dtype, seed: decode(wire, n, dtype))


def _through_host(found: Codec) -> OnTensors:
    def encode(x: torch.Tensor, seed: int) -> torch.Tensor:
        return torch.from_numpy(found.encoded(x.cpu().numpy(), seed).copy()).to(x.device)

    def decode(wire: torch.Tensor, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        values = found.decoded(wire.cpu().numpy(), n, torch.empty(0, dtype=dtype).numpy().dtype, seed)
        return torch.from_numpy(values).to(wire.device)

    return OnTensors(encode, decode)


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).to(torch.bfloat16).view(torch.uint8)


def _from_bf16(wire: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    return wire.view(torch.bfloat16)[:n].to(dtype)


def _to_int8(x: torch.Tensor) -> torch.Tensor:
    n = len(x)
    rows = x.new_zeros(-(-n // BLOCK) * BLOCK, dtype=torch.float32)
    rows[:n] = x
    rows = rows.view(-1, BLOCK)
    scale = rows.abs().amax(1) / 127
    whole = torch.round(rows / torch.where(scale > 0, scale, 1.0).unsqueeze(1)).to(torch.int8)
    return torch.cat((whole.view(-1)[:n].view(torch.uint8), scale.view(torch.uint8)))


def _from_int8(wire: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    scale = wire[n:].clone().view(torch.float32)  # at any byte: a view needs a multiple of four
    return (wire[:n].view(torch.int8).to(torch.float32) * scale.repeat_interleave(BLOCK)[:n]).to(dtype)


FAST = {
    "none": (lambda x: x.contiguous().view(torch.uint8), lambda wire, n, dtype: wire.view(dtype)[:n]),
    "bf16": (_to_bf16, _from_bf16),
    "int8": (_to_int8, _from_int8),
}
