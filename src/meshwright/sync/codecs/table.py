"""Rounding to a table: a byte is a sign and the place of a magnitude among 128 ascending ones from zero on."""

from __future__ import annotations

import numpy as np


def nearest(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Find the codes uint8 [n] of the magnitudes of `table` nearest to those of values [n]; of two equally
    near the one with an even place, and the last for all beyond it."""
    middle, size = (table[1:] + table[:-1]) / 2, np.abs(x)
    below, above = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    place = np.where(below % 2 == 0, below, above).astype(np.uint8)
    return place | (np.signbit(x).astype(np.uint8) << 7)


def looked_up(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Read the signed magnitudes of codes [n]."""
    size = table[codes & 127]
    return np.where(codes > 127, -size, size)
