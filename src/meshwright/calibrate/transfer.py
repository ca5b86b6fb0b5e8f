"""A device left out: how badly others' curves predict it, which is the spread that carried curves get.

Every sample is predicted as a price would be if its device had not been measured, if none of that device's variants
had been either, if this precision alone had not been measured on it, and by the roofline.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.calibrate.kernels import NORMAL_80, kernel_share, median_ape, p90_ape
from meshwright.calibrate.samples import Sample
from meshwright.cost.bound import KIN
from meshwright.cost.carried import DEVICE, PRECISION, ROOFLINE, VARIANTS, Carried, Spreads, width
from meshwright.cost.chain import roofline_estimate
from meshwright.cost.curve import SIGMA_CLASSES, CurveProfile, sigma_class
from meshwright.cost.fitted import Fitted
from meshwright.cost.points import point
from meshwright.cost.relatives import VARIANTS as VARIANTS_WITHIN
from meshwright.cost.relatives import apart
from meshwright.spec.cluster import load_device

#: Rows of a device that are priced, evenly spread over the table: enough for a quantile.
ROWS = 600
#: A class of durations with fewer rows takes the spread of all.
FEWEST = 30


def leave_out(
    samples: list[Sample], training: dict[str, CurveProfile], serving: dict[str, CurveProfile]
) -> list[Carried]:
    """Every sample predicted by what others know, for all that can be left out, and by the roofline; by the curves that
    `training` or `serving` would ask, as its rows were measured."""
    found = []
    for sample in samples:
        step = max(1, len(sample.seconds) // ROWS)
        part = sample.where(np.arange(len(sample.seconds)) % step == 0)
        for left, profiles in _left_out(sample, serving if sample.serving else training):
            link = Fitted(profiles, Spreads(()), serving=sample.serving, flash=sample.flash, library=sample.library)
            first = part.works[0][0]
            at = point(first, serving=sample.serving, library=sample.library)
            curves = link.bound(part.device, at.ops or link.core(first, part.device), at.dtype, at.like)
            if curves:
                predicted = part.around_s + np.array([_seconds(link, works, part) for works in part.works])
                found.append(_scored(part, left, curves[0].owner, curves[0].distance, predicted))
        if sample.op in ("gemm", "grouped_gemm"):
            ideal = np.array([sum(roofline_estimate(k, part.device).seconds for k in some) for some in part.works])
            found.append(_scored(part, ROOFLINE, ROOFLINE, 0.0, part.around_s + ideal))
    return found


def _seconds(link: Fitted, works: tuple, part: Sample) -> float:
    return sum(link(work, part.device).seconds for work in works)


def _left_out(sample: Sample, profiles: dict[str, CurveProfile]) -> Iterator[tuple[str, dict[str, CurveProfile]]]:
    """Yield what is left out of the profiles, and what stays of them."""
    device = sample.device
    others = {name: p for name, p in profiles.items() if name != device.name}
    yield DEVICE, others
    measured = [name for name, p in others.items() if any(c.op == sample.op for c in p.curves)]
    near = {n for n in measured if apart(load_device(n), device, sample.dtype, sample.dtype) <= VARIANTS_WITHIN}
    if near:
        yield VARIANTS, {name: p for name, p in others.items() if name not in near}
    own = profiles.get(device.name)
    alike = {d for d in KIN.get(sample.dtype, (sample.dtype,)) if width(d) == width(sample.dtype)}
    if own is not None:
        rest = tuple(c for c in own.curves if c.op != sample.op or c.dtype not in alike)
        if any(c.op == sample.op for c in rest):
            yield PRECISION, others | {device.name: _only(own, rest)}


def _only(profile: CurveProfile, curves: tuple) -> CurveProfile:
    return CurveProfile(
        format_version=profile.format_version,
        code_version=profile.code_version,
        device=profile.device,
        curves=curves,
    )


def _scored(part: Sample, left: str, owner: str, distance: float, predicted: np.ndarray) -> Carried:
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
        left=left,
        distance=round(distance, 2),
        rows=len(predicted),
        median_ape=round(median_ape(predicted, part.seconds), 4),
        p90_ape=round(p90_ape(predicted, part.seconds), 4),
        bias=round(float(np.median(off)), 4),
        spread=tuple(spread),
    )
