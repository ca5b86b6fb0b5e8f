"""Ties: plans whose difference is within what is unknown (``search/draws.py``), and spellings of one plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.plan import Plan
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
