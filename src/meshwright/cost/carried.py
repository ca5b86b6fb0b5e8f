"""Spread of prices that no measurement of their own device stands behind: curves carried from another device or to
another precision, and the roofline.

Every device with a table has been left out once: its rows were predicted by what the others know, and how far off that
was is kept by kind of curve, precision, how near the curve's owner is, and duration. A device that nobody measured gets
the spread that those left out show; few devices are pulled towards what more of them show.
"""

from __future__ import annotations

from functools import cache
from math import sqrt

import msgspec

from meshwright.spec.workload import DTYPE_BYTES

#: How near a price's origin is: a device of the same generation; of another one with the same kind of matrix
#: instructions; with another kind; a curve of another width of numbers; the roofline.
SAME, NEAR, OTHER, KIN, ROOFLINE = NEARNESS = ("same", "near", "other", "kin", "roofline")
#: Curves of one formula, which stand in for one another where no device was left out of one's own.
FAMILY = {"flash_fwd": ("prefill",), "prefill": ("flash_fwd",)}
#: As many devices' worth of evidence has the wider class that a narrow one is pulled towards.
PRIOR_DEVICES = 1.0
#: Spread where nothing was left out.
UNKNOWN = 0.30


class Carried(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One device's rows as a curve of another device (or the roofline) predicts them.

    `near` is how near that origin is, `spread` one standard deviation of the log per ``SIGMA_CLASSES`` of durations,
    the errors are fractions, `bias` the median of the log of predicted over measured."""

    op: str
    dtype: str
    device: str
    from_device: str
    near: str
    rows: int
    median_ape: float
    p90_ape: float
    bias: float
    spread: tuple[float, float, float, float]


def width(dtype: str) -> float:
    """Return the bytes of one number of a precision's operands; those of products of fewer bits by their weights."""
    return DTYPE_BYTES.get(dtype, 1.0)


class Spreads:
    """The spreads that devices left out show."""

    def __init__(self, left: tuple[Carried, ...]):
        self.left = left
        self.of = cache(self._of)

    def without(self, device: str) -> Spreads:
        """Return what all others show: neither rows of a device nor what its curves predict."""
        return Spreads(tuple(one for one in self.left if device not in (one.device, one.from_device)))

    def _of(self, op: str, near: str, dtype: str) -> tuple[float, float, float, float]:
        """Return the spread of one kind of curve and precision from so near, per class of durations."""
        known = {one.op for one in self.left}
        ops = (op,) if op in known else FAMILY.get(op, ())
        alike = [one for one in self.left if one.op in ops and (one.near == ROOFLINE) == (near == ROOFLINE)]
        as_near = [one for one in alike if one.near == near]
        found: tuple[float, ...] | None = None
        for some in (alike, as_near, [one for one in as_near if width(one.dtype) == width(dtype)]):
            if some:
                own = [sqrt(sum(one.spread[c] ** 2 for one in some) / len(some)) for c in range(4)]
                count = len({one.device for one in some})
                found = tuple(own) if found is None else tuple(_pulled(a, b, count) for a, b in zip(own, found))
        a, b, c, d = found or (UNKNOWN,) * 4
        return a, b, c, d


def _pulled(own: float, wider: float, devices: int) -> float:
    return sqrt((devices * own**2 + PRIOR_DEVICES * wider**2) / (devices + PRIOR_DEVICES))
