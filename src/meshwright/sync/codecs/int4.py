"""Block quantisation to 4 bits: values are integers of -7 to 7 times the 32-bit scale of their block, which is its
largest magnitude over 7, with what rounding loses fed back (as 1-bit Adam's codes, Tang et al. 2102.02888)."""

from __future__ import annotations

import numpy as np

from meshwright.sync.codecs import Codec

#: Values that share a scale: 4.25 bits a value.
BLOCK = 128


def encode(x: np.ndarray) -> np.ndarray:
    """Quantise values [n]: two integers a byte, each plus 8, the first in the lower half; then the blocks' scales."""
    blocks = -(-len(x) // BLOCK)
    rows = np.zeros(blocks * BLOCK, np.float32)
    rows[: len(x)] = x
    rows = rows.reshape(blocks, BLOCK)
    scale = np.abs(rows).max(axis=1, initial=0) / np.float32(7)
    whole = np.rint(rows / np.where(scale > 0, scale, np.float32(1))[:, None]).reshape(-1)
    codes = (whole + 8).astype(np.uint8)
    pairs = (codes[::2] | codes[1::2] << 4)[: -(-len(x) // 2)]
    return np.concatenate((pairs, scale.view(np.uint8)))


def decode(wire: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
    """Multiply the integers by their scales."""
    packed = -(-n // 2)
    scale = wire[packed:].copy().view(np.float32)
    codes = np.stack((wire[:packed] & 15, wire[:packed] >> 4), axis=1).reshape(-1)[:n]
    return ((codes.astype(np.float32) - 8) * np.repeat(scale, BLOCK)[:n]).astype(dtype)


INT4 = Codec(
    name="int4",
    title="4 bits and a scale for 128 values",
    paper="Dettmers et al., 2021, arXiv 2110.02861; Tang et al., 2021, arXiv 2102.02888",
    exact=False,
    summed="",
    wire_bytes=lambda n, element_bytes: -(-n // 2) + 4 * -(-n // BLOCK),
    moved=lambda n, element_bytes: (2 * element_bytes * n + -(-n // 2), element_bytes * n + -(-n // 2)),
    encode=encode,
    decode=decode,
    feedback=True,
)

CODECS = (INT4,)
