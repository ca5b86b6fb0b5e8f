"""Spread of prices that no measurement of their own device stands behind: curves carried from another device or to
another precision, and the roofline.

Every device with a table has been left out: alone, with all of its variants, and one of its precisions at a time. The
rows were predicted by what the others know, and how far off that was is kept by kind of curve, precision, the distance
of the nearest curve (``relatives.apart``) and duration. A price gets the spread that predictions from so far showed;
few devices are pulled towards what more of them show.
"""

from __future__ import annotations

from functools import cache
from math import exp, log, sqrt

import msgspec

from meshwright.spec.workload import DTYPE_BYTES

#: What was left out: a device, all of its variants too, one of its precisions; or the roofline answered.
DEVICE, VARIANTS, PRECISION, ROOFLINE = LEFT = ("device", "variants", "precision", "roofline")
#: Curves of one formula, which stand in for one another where no device was left out of one's own.
FAMILY = {"flash_fwd": ("prefill",), "prefill": ("flash_fwd",), "flash_bwd": ("flash_fwd", "prefill")}
#: As many devices' worth of evidence has the wider class that a narrow one is pulled towards.
PRIOR_DEVICES = 0.5
#: Distances are alike by the logarithm of their ratio: one standard deviation of the weight that rows have, and what is
#: added to every distance, so that none is 0.
ALIKE, SOFT = 0.6, 0.25
#: Spread where nothing was left out.
UNKNOWN = 0.30


class Carried(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One device's rows as curves of other devices (or the roofline) predict them.

    `from_device` has the nearest of those curves, at a `distance`; `left` is what was left out, `spread` one standard
    deviation of the log per ``SIGMA_CLASSES`` of durations, the errors are fractions, `bias` the median of the log of
    predicted over measured."""

    op: str
    dtype: str
    device: str
    from_device: str
    left: str
    distance: float
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

    def __init__(self, rows: tuple[Carried, ...]):
        self.rows = rows
        self.of = cache(self._of)
        self.by_roofline = cache(self._by_roofline)

    def without(self, device: str) -> Spreads:
        """Return what all others show: neither rows of a device nor what its curves predict."""
        return Spreads(tuple(one for one in self.rows if device not in (one.device, one.from_device)))

    def _of(self, op: str, distance: float, dtype: str) -> tuple[float, float, float, float]:
        """Return the spread of one kind of curve and precision from so far, per class of durations."""
        carried = [one for one in self.rows if one.left != ROOFLINE]
        known = {one.op for one in carried}
        ops = (op,) if op in known else FAMILY.get(op, ())
        alike = [one for one in carried if one.op in ops]
        return _narrowed([carried, alike, [one for one in alike if width(one.dtype) == width(dtype)]], distance)

    def _by_roofline(self, op: str, dtype: str) -> tuple[float, float, float, float]:
        """Return the spread of the roofline for one kind of kernel and precision, per class of durations."""
        alike = [one for one in self.rows if one.left == ROOFLINE and one.op == op]
        return _narrowed([alike, [one for one in alike if width(one.dtype) == width(dtype)]], 0.0)


def _narrowed(classes: list[list[Carried]], distance: float) -> tuple[float, float, float, float]:
    """The spread of the narrowest of ever narrower classes, each pulled towards the one that holds it."""
    found: tuple[float, ...] | None = None
    for some in classes:
        near = [(one, exp(-0.5 * (log((one.distance + SOFT) / (distance + SOFT)) / ALIKE) ** 2)) for one in some]
        total = sum(w for _, w in near)
        if total < 1e-6:
            continue
        own = [sqrt(sum(w * one.spread[c] ** 2 for one, w in near) / total) for c in range(4)]
        best: dict[str, float] = {}
        for one, w in near:
            best[one.device] = max(w, best.get(one.device, 0.0))
        found = tuple(own) if found is None else tuple(_pulled(a, b, sum(best.values())) for a, b in zip(own, found))
    a, b, c, d = found or (UNKNOWN,) * 4
    return a, b, c, d


def _pulled(own: float, wider: float, devices: float) -> float:
    return sqrt((devices * own**2 + PRIOR_DEVICES * wider**2) / (devices + PRIOR_DEVICES))
