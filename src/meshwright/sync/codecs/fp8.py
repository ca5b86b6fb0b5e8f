"""Eight-bit floating point, E4M3 (Micikevicius et al. 2209.05433): 4 bits of exponent, 3 of fraction, the largest 448.

Values are divided by the 32-bit scale of their block of 256, which brings its largest to 448.
"""

from __future__ import annotations

import numpy as np

from meshwright.sync.codecs import Codec
from meshwright.sync.codecs.table import looked_up, nearest

#: Values that share a scale, and the largest magnitude of the format.
BLOCK, LARGEST = 256, 448.0


def magnitudes() -> np.ndarray:
    """Magnitudes of the codes 0 to 126, and the largest again for the code 127, which is no number and never sent."""
    code = np.arange(127)
    exponent, fraction = code >> 3, code & 7
    small = fraction * 2.0**-9
    return np.append(np.where(exponent == 0, small, (8 + fraction) * 2.0 ** (exponent - 10)), LARGEST)


TABLE = magnitudes()


def encode(x: np.ndarray) -> np.ndarray:
    """Round values [n] to the format: a byte of each, then the float32 scales of the blocks."""
    blocks = -(-len(x) // BLOCK)
    rows = np.zeros(blocks * BLOCK, np.float32)
    rows[: len(x)] = x
    rows = rows.reshape(blocks, BLOCK)
    scale = np.abs(rows).max(axis=1, initial=0) / np.float32(LARGEST)
    codes = nearest(TABLE[:127], (rows / np.where(scale > 0, scale, np.float32(1))[:, None]).reshape(-1)[: len(x)])
    return np.concatenate((codes, scale.view(np.uint8)))


def decode(wire: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
    """Multiply the n numbers of such bytes by their scales."""
    scale = wire[n:].copy().view(np.float32)
    return (looked_up(TABLE, wire[:n]).astype(np.float32) * np.repeat(scale, BLOCK)[:n]).astype(dtype)


FP8 = Codec(
    name="fp8",
    title="8-bit floating point (E4M3) and a scale for 256 values",
    paper="Micikevicius et al., 2022, arXiv 2209.05433",
    exact=False,
    summed="",
    wire_bytes=lambda n, element_bytes: n + 4 * -(-n // BLOCK),
    moved=lambda n, element_bytes: ((2 * element_bytes + 1) * n, (element_bytes + 1) * n),
    encode=encode,
    decode=decode,
)

CODECS = (FP8,)
