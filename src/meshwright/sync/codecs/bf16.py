"""bfloat16: the upper half of a 32-bit number, rounded to the nearest, ties to even (Kalamkar et al. 1905.12322)."""

from __future__ import annotations

import numpy as np

from meshwright.sync.codecs import Codec


def encode(x: np.ndarray) -> np.ndarray:
    """Round values [n] to bfloat16: uint8 [2n]."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # wraps for a NaN alone, which is set below
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16).view(np.uint8)


def decode(wire: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
    """Read the n values of such bytes."""
    return (wire.view(np.uint16)[:n].astype(np.uint32) << 16).view(np.float32).astype(dtype)


BF16 = Codec(
    name="bf16",
    title="bfloat16",
    paper="Kalamkar et al., 2019, arXiv 1905.12322",
    exact=False,
    summed="bf16",
    wire_bytes=lambda n, element_bytes: 2 * n,
    moved=lambda n, element_bytes: ((element_bytes + 2) * n, (element_bytes + 2) * n),
    encode=encode,
    decode=decode,
    each=True,
)

CODECS = (BF16,)
