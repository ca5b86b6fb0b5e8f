"""Ties: plans whose difference is within what the costs are unsure of, and the measurement that would decide.

Two predictions err together: if matrix products are slower than assumed, they are for both. So plans are compared
draw by draw with the same errors in both (common random numbers, Law and Kelton, 2000, section 11.2); when the 80%
interval of the difference includes zero, nothing says which is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.answer.intervals import class_sigma, interval_draws
from meshwright.causes import ERROR_CLASS, ERROR_CLASSES, PRICED
from meshwright.plan import Plan
from meshwright.simulate.engine import makespans
from meshwright.simulate.simulated import Simulated


class Tie(NamedTuple):
    """Two plans that cannot be told apart: the 80% interval of the difference in seconds, and what to measure."""

    low_s: float
    high_s: float
    measure: str


def simplicity(plan: Plan) -> tuple[int, int, str]:
    """Fewer words first, then less that is sharded."""
    text = plan.text()
    return len(text.split()), plan.layout.zero, text


def same_work(a: Simulated, b: Simulated) -> bool:
    """Whether two plans do the same at the same times: one plan in two spellings."""
    return np.array_equal(a.start_s, b.start_s) and np.array_equal(a.end_s, b.end_s)


def difference(a: Simulated, b: Simulated) -> tuple[float, float]:
    """80% interval of a's step time less b's, seconds, under common errors."""
    low, high = np.quantile(interval_draws(a) - interval_draws(b), [0.1, 0.9])
    exact = a.step_time_s - b.step_time_s
    return min(float(low), exact), max(float(high), exact)


def tie(a: Simulated, b: Simulated) -> Tie | None:
    """Return the tie of two plans with the measurement that would break it; None when they can be told apart."""
    low, high = difference(a, b)
    if low > 0 or high < 0:
        return None
    moved = {name: abs(_shift(a, name) - _shift(b, name)) for name in ERROR_CLASSES}
    decisive = max(moved, key=lambda name: moved[name])
    measure = ERROR_CLASSES[decisive] if moved[decisive] > 0 else "nothing: both do the same work"
    return Tie(low, high, measure)


def _shift(run: Simulated, name: str) -> float:
    """Return the seconds by which a step grows when one class of work is a standard deviation slower."""
    slower = np.exp(class_sigma(run)[name])
    factors = np.array([slower if ERROR_CLASS[cause] == name else 1.0 for cause in PRICED])
    seconds = makespans(run.lowered.graph, (run.priced.parts @ factors)[None])
    return float(seconds[0]) - run.step_time_s
