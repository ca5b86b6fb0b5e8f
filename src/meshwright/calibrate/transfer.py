"""A device left out: how badly curves of its nearest relative predict it, which is the spread carried curves get.

The relative of the same generation (H200 for H100) and the one of another generation (A100 for H100) are scored
apart, as the interval of a device nobody measured depends on which of them it has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.calibrate.kernels import NORMAL_80, FittedCurve, median_ape, p90_ape
from meshwright.cost.curve import CurveProfile
from meshwright.cost.fitted import Fitted as Link
from meshwright.cost.fitted import nearest_curve
from meshwright.spec.cluster import load_device

#: Rows of a device that are priced, evenly spread over the table: enough for a quantile.
ROWS = 2000


class Transferred(NamedTuple):
    """One device's rows as a curve of another predicts them; `near` is "same" or "other" generation."""

    op: str
    dtype: str
    device: str
    from_device: str
    near: str
    rows: int
    median_ape: float
    p90_ape: float
    bias: float
    spread: float


def leave_out(fits: list[FittedCurve], profiles: dict[str, CurveProfile]) -> list[Transferred]:
    """Every sample predicted from other devices' curves, once per generation distance that has any."""
    link = Link(profiles, {})
    found = []
    for fitted in fits:
        sample = fitted.sample
        for near in ("same", "other"):
            allowed = [
                name
                for name in profiles
                if name != sample.device.name
                and (load_device(name).architecture == sample.device.architecture) == (near == "same")
            ]
            curve = nearest_curve(link, sample.device, (sample.op,), sample.dtype, allowed)
            if curve is None:
                continue
            step = max(1, len(sample.seconds) // ROWS)
            part = sample.where(np.arange(len(sample.seconds)) % step == 0)
            predicted = part.around_s.copy()
            for c, points in enumerate(part.points):
                priced = np.array([curve.price(tuple(x.tolist())).seconds for x in points])
                predicted += np.where(part.count > c, priced, 0.0)
            log_error = np.log(predicted / part.seconds)
            found.append(
                Transferred(
                    op=sample.op,
                    dtype=sample.dtype,
                    device=sample.device.name,
                    from_device=curve.owner,
                    near=near,
                    rows=len(predicted),
                    median_ape=median_ape(predicted, part.seconds),
                    p90_ape=p90_ape(predicted, part.seconds),
                    bias=float(np.mean(predicted / part.seconds) - 1),
                    spread=float(np.quantile(np.abs(log_error), 0.8)) / NORMAL_80,
                )
            )
    return found


def spreads(left: list[Transferred]) -> dict[str, dict[str, float]]:
    """Kind of curve -> generation -> typical spread of a device left out (the median over them, as a device that
    its power limit slows far below its peak says little of others): what `transfer.json` holds."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in left:
        found.setdefault(row.op, {}).setdefault(row.near, []).append(row.spread)
    return {
        op: {near: round(float(np.median(v)), 4) for near, v in sorted(by.items())} for op, by in sorted(found.items())
    }
