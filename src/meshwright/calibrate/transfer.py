"""A device left out: how badly others' curves predict it, which is the spread that carried curves get.

Every sample is predicted once from each distance that has a curve (the same generation, another one with the same kind
of matrix instructions, another kind, another width of numbers) and once by the roofline.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.calibrate.kernels import NORMAL_80, FittedCurve, kernel_share, median_ape, p90_ape
from meshwright.calibrate.samples import Sample
from meshwright.cost.carried import KIN, NEAR, OTHER, ROOFLINE, SAME, Carried, Spreads
from meshwright.cost.chain import roofline_estimate
from meshwright.cost.curve import SIGMA_CLASSES, CurveProfile, sigma_class
from meshwright.cost.fitted import BoundCurve, nearest_curve
from meshwright.cost.fitted import Fitted as Link
from meshwright.cost.relatives import nearness
from meshwright.spec.cluster import load_device

#: Rows of a device that are priced, evenly spread over the table: enough for a quantile.
ROWS = 2000
#: A class of durations with fewer rows takes the spread of all.
FEWEST = 30


def leave_out(fits: list[FittedCurve], profiles: dict[str, CurveProfile]) -> list[Carried]:
    """Every sample predicted from other devices' curves, once per distance that has any, and by the roofline."""
    link = Link(profiles, Spreads(()))
    found = []
    for fitted in fits:
        sample = fitted.sample
        step = max(1, len(sample.seconds) // ROWS)
        part = sample.where(np.arange(len(sample.seconds)) % step == 0)
        for near, curve in _origins(link, sample, profiles):
            found.append(_scored(part, near, curve.owner, _priced(part, curve)))
        if sample.op in ("gemm", "grouped_gemm"):
            own = np.array([sum(roofline_estimate(k, part.device).seconds for k in some) for some in part.works])
            found.append(_scored(part, ROOFLINE, ROOFLINE, part.around_s + own))
    return found


def _origins(link: Link, sample: Sample, profiles: dict[str, CurveProfile]) -> Iterator[tuple[str, BoundCurve]]:
    """Yield the curve that a device would get from each distance."""
    for near in (SAME, NEAR, OTHER):
        others = [n for n in profiles if n != sample.device.name and nearness(load_device(n), sample.device) == near]
        curve = nearest_curve(link, sample.device, (sample.op,), sample.dtype, others)
        if curve is not None:
            yield curve.near, curve
    curves = {
        name: CurveProfile(
            format_version=p.format_version,
            code_version=p.code_version,
            device=name,
            curves=tuple(c for c in p.curves if c.dtype != sample.dtype),
        )
        for name, p in profiles.items()
    }
    other = nearest_curve(Link(curves, Spreads(())), sample.device, (sample.op,), sample.dtype)
    if other is not None and other.near == KIN:
        yield KIN, other


def _priced(part: Sample, curve: BoundCurve) -> np.ndarray:
    """Seconds of every row by a curve."""
    predicted = part.around_s.copy()
    for c, points in enumerate(part.points):
        priced = np.array([curve.price(tuple(x.tolist())).seconds for x in points])
        predicted += np.where(part.count > c, priced, 0.0)
    return predicted


def _scored(part: Sample, near: str, owner: str, predicted: np.ndarray) -> Carried:
    off = np.log(predicted / part.seconds)
    kernels = off / kernel_share(part, predicted)
    kinds = np.array([sigma_class(s) for s in predicted])
    spread = []
    for kind in range(len(SIGMA_CLASSES)):
        own = kernels[kinds == kind]
        spread.append(round(float(np.quantile(np.abs(own if len(own) >= FEWEST else kernels), 0.8)) / NORMAL_80, 4))
    return Carried(
        op=part.op,
        dtype=part.dtype,
        device=part.device.name,
        from_device=owner,
        near=near,
        rows=len(predicted),
        median_ape=round(median_ape(predicted, part.seconds), 4),
        p90_ape=round(p90_ape(predicted, part.seconds), 4),
        bias=round(float(np.median(off)), 4),
        spread=tuple(spread),
    )
