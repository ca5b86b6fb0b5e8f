"""Eight bits a number over six standard deviations either side of the mean: INTELLECT-1 sends changes of rounds so.

The range is cut into 256 levels of equal width, and a number is the middle of its level; the lowest value and the width
travel beside them as 32-bit numbers. What lies further out than six deviations is clipped.
"""

from __future__ import annotations

import numpy as np

from meshwright.sync.codecs import Codec

LEVELS, DEVIATIONS = 256, 6


def encode(x: np.ndarray) -> np.ndarray:
    """Find the level of each value [n]: a byte each, then the float32 of the lowest value and of the width."""
    mean, spread = float(x.mean()) if len(x) else 0.0, float(x.std()) if len(x) else 0.0
    edge = DEVIATIONS * (spread or 1e-12)
    range_ = np.array([mean - edge, 2 * edge / LEVELS], np.float32)
    low, width = range_.astype(np.float64)
    codes = np.clip((x - low) // width, 0, LEVELS - 1).astype(np.uint8)
    return np.concatenate((codes, range_.view(np.uint8)))


def decode(wire: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
    """Read the middles of the levels of n values."""
    low, width = wire[n:].copy().view(np.float32).astype(np.float64)
    return (low + (wire[:n] + 0.5) * width).astype(dtype)


SIGMA8 = Codec(
    name="sigma8",
    title="8 bits over six standard deviations",
    paper="Jaghouar et al., 2024, arXiv 2412.01152",
    exact=False,
    summed="",
    wire_bytes=lambda n, element_bytes: n + 8,
    moved=lambda n, element_bytes: ((2 * element_bytes + 1) * n, (element_bytes + 1) * n),
    encode=encode,
    decode=decode,
)

CODECS = (SIGMA8,)
