"""Block quantisation to 8 bits: values are integers of -127 to 127 times the 32-bit scale of their block, which is its
largest magnitude over 127 (block-wise as in Dettmers et al. 2110.02861; linear within a block)."""

from __future__ import annotations

import numpy as np

from meshwright.sync.codecs import Codec

#: Values that share a scale.
BLOCK = 256


def encode(x: np.ndarray) -> np.ndarray:
    """Quantise values [n]: int8 of each, then the float32 scales of the blocks."""
    blocks = -(-len(x) // BLOCK)
    rows = np.zeros(blocks * BLOCK, np.float32)
    rows[: len(x)] = x
    rows = rows.reshape(blocks, BLOCK)
    scale = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
    whole = np.rint(rows / np.where(scale > 0, scale, np.float32(1))[:, None]).astype(np.int8)
    return np.concatenate((whole.reshape(-1)[: len(x)].view(np.uint8), scale.view(np.uint8)))


def decode(wire: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
    """Multiply the integers by their scales."""
    scale = wire[n:].copy().view(np.float32)
    return (wire[:n].view(np.int8).astype(np.float32) * np.repeat(scale, BLOCK)[:n]).astype(dtype)


INT8 = Codec(
    name="int8",
    title="8 bits and a scale for 256 values",
    paper="Dettmers et al., 2021, arXiv 2110.02861",
    exact=False,
    summed="",
    wire_bytes=lambda n, element_bytes: n + 4 * -(-n // BLOCK),
    moved=lambda n, element_bytes: ((2 * element_bytes + 1) * n, (element_bytes + 1) * n),
    encode=encode,
    decode=decode,
)

CODECS = (INT8,)
