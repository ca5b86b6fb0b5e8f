"""What a simulation leaves: a plan's graph with its prices and the times at which everything ran."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.lower import Lowered
from meshwright.simulate.price import Priced


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """A lowered, priced and timed plan: what every number of a prediction is read off. ``step_sigma`` is the relative
    error of the framework's profile: where that was ``fitted``, of whole measured steps, their kernels' and
    collectives' errors included; else what comes on top of them. ``schedule_params`` are what the schedule was built
    for, besides its size."""

    lowered: Lowered
    priced: Priced
    start_s: np.ndarray
    end_s: np.ndarray
    step_sigma: float = 0.0
    fitted: bool = False
    schedule_params: dict[str, object] = {}

    @property
    def step_time_s(self) -> float:
        return float(self.end_s.max())
