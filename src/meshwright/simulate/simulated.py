"""What a simulation leaves: a plan's graph with its prices and the times at which everything ran."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.cost import Costs
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

    @classmethod
    def of(
        cls,
        lowered: Lowered,
        priced: Priced,
        times: tuple[np.ndarray, np.ndarray],
        costs: Costs,
        schedule_params: dict[str, object] | None = None,
    ) -> Simulated:
        """Build the simulated step that `costs` priced and the clock gave these start and end times, seconds."""
        framework = costs.framework
        return cls(
            lowered=lowered,
            priced=priced,
            start_s=times[0],
            end_s=times[1],
            step_sigma=framework.step_sigma,
            fitted=not framework.flagged,
            schedule_params=schedule_params or {},
        )

    @property
    def step_time_s(self) -> float:
        return float(self.end_s.max())
