"""The report of a calibration: constants with their units, measured against predicted by size, and errors on groups
held out, in sample, and on devices left out."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log10

import msgspec
import numpy as np

from meshwright.calibrate.kernels import FittedCurve, median_ape, p90_ape
from meshwright.calibrate.samples import LeftRows as Skipped
from meshwright.calibrate.samples import shape_of
from meshwright.cost.carried import Carried
from meshwright.cost.curve import SIGMA_CLASSES

FORMAT_VERSION = 1


def lines(fits: list[FittedCurve], left: list[Carried], skipped: list[Skipped], holdout: float) -> Iterator[str]:
    """The whole report as text."""
    for fitted in fits:
        yield from _one(fitted, holdout)
        yield ""
    yield "Summary: median and 90th percentile of |predicted/measured - 1|"
    yield f"  {'device':<16} {'curve':<24} {'rows':>6}  {'held out':>14}  {'in sample':>14}"
    for fitted in fits:
        fit = fitted.fit
        held = _pair(fit.errors, "held_out") if "held_out_median" in fit.errors else "-"
        name, seen = f"{fit.op} {fit.dtype}", _pair(fit.errors, "in_sample")
        yield f"  {fitted.sample.device.name:<16} {name:<24} {fit.rows:>6}  {held:>14}  {seen:>14}"
    if left:
        yield ""
        yield "Left out, and predicted by the curves of others (the nearest, and how far it is) or by the roofline"
        where = f"{'left out':<10} {'nearest':<16} {'apart':>5}"
        yield f"  {'device':<16} {'curve':<24} {where}  {'error':>14}  {'bias':>6}"
        for row in left:
            error = f"{row.median_ape:.1%} / {row.p90_ape:.1%}"
            name = f"{row.op} {row.dtype}"
            where = f"{row.left:<10} {row.from_device:<16} {row.distance:>5.1f}"
            yield f"  {row.device:<16} {name:<24} {where}  {error:>14}  {row.bias:>+6.0%}"
    for row in skipped:
        yield f"left out of {row.table}: {row.what} ({row.rows} rows)"


def _one(fitted: FittedCurve, holdout: float) -> Iterator[str]:
    sample, fit = fitted.sample, fitted.fit
    yield f"{sample.device.name}: {fit.op} {fit.dtype}, {fit.rows} rows of {fit.source}"
    yield "  " + ", ".join(
        f"{name} {low:g}..{high:g}"
        for name, low, high in zip(shape_of(sample).axis_names, np.exp2(fit.low).round(), np.exp2(fit.high).round())
    )
    for constant in shape_of(sample).constants:
        value = fit.constants[constant.name]
        # Where it started, or where it may not go further: other values fit these rows as well or better.
        free = " [not determined by these rows]" if value in (constant.start, constant.low, constant.high) else ""
        yield f"  {constant.name:<14} {value:>10.4g} {constant.unit:<9} {constant.meaning}{free}"
    yield f"  residual at {len(fit.residual)} nodes"
    yield f"  {'FLOP':>6} {'rows':>6} {'measured':>10} {'predicted':>10} {'median':>7} {'p90':>7} {'bias':>7}"
    decade = np.array([floor(log10(f)) for f in sample.flops])
    for d in sorted(set(decade.tolist())):
        own = decade == d
        true, told = sample.seconds[own], fitted.in_sample_s[own]
        yield (
            f"  {f'1e{d}':>6} {own.sum():>6} {_tera(sample.flops[own], true):>10} {_tera(sample.flops[own], told):>10}"
            f" {median_ape(told, true):>7.1%} {p90_ape(told, true):>7.1%} {np.mean(told / true) - 1:>+7.1%}"
        )
    if "held_out_median" in fit.errors:
        share, error = fitted.held_out.mean(), _pair(fit.errors, "held_out")
        yield f"  held out by {sample.grouped_by} ({holdout:g} of groups, {share:.0%} of rows): {error}"
    yield f"  in sample: {_pair(fit.errors, 'in_sample')}"
    yield "  sigma " + ", ".join(f"{name} {s:.3f}" for name, s in zip(SIGMA_CLASSES, fit.sigma))


def _tera(flops: np.ndarray, seconds: np.ndarray) -> str:
    return f"{np.median(flops / seconds) / 1e12:.4g}T/s"


def _pair(errors: dict[str, float], which: str) -> str:
    return f"{errors[f'{which}_median']:.1%} / {errors[f'{which}_p90']:.1%}"


def as_json(fits: list[FittedCurve], left: list[Carried], skipped: list[Skipped]) -> dict:
    """Return the figures of the report as JSON values, for a program."""
    return {
        "format_version": FORMAT_VERSION,
        "curves": [
            {
                "device": f.sample.device.name,
                "op": f.fit.op,
                "dtype": f.fit.dtype,
                "rows": f.fit.rows,
                "held_out_by": f.sample.grouped_by,
                "constants": f.fit.constants,
                "sigma": f.fit.sigma,
                "errors": f.fit.errors,
                "source": f.fit.source,
            }
            for f in fits
        ],
        "device_left_out": [msgspec.structs.asdict(row) for row in left],
        "skipped": [row._asdict() for row in skipped],
    }
