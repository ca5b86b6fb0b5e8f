"""The result of a simulation: a plan's graph with its prices and the times at which everything ran."""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.lower import Lowered
from meshwright.lower.filling import Filled
from meshwright.simulate.memory import Ordered, ordered
from meshwright.simulate.price import Priced
from meshwright.simulate.rounds import Round, round_of
from meshwright.simulate.swarm import SwarmRun


class Simulated(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A lowered, priced and timed plan, from which all numbers of a prediction are read. ``step_sigma`` is the relative
    error of the framework's profile: where that was ``fitted``, of whole measured steps, their kernels' and
    collectives' errors included; else what comes on top of them. ``schedule_params`` are what the schedule was built
    for, besides its size. ``round``: the times are those of the step that exchanges, one of several; None where
    all steps are alike. ``moving``: the step that a plan with a reference point takes besides in a ``share`` of its
    steps, with a pass of its own, when that point moves. ``swarm``: the steps of peers that are chosen as it goes; the
    times are then those of fixed ranks, and ``wave`` the step of one microbatch on each, which is what a peer does.
    ``filled``: what frozen layers do beside the trained ones (``lower/filling.py``)."""

    lowered: Lowered
    priced: Priced
    start_s: np.ndarray
    end_s: np.ndarray
    step_sigma: float = 0.0
    fitted: bool = False
    schedule_params: dict[str, object] = {}
    round: Round | None = None
    moving: Simulated | None = None
    share: float = 0.0
    swarm: SwarmRun | None = None
    wave: Simulated | None = None
    filled: Filled | None = None

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
        framework, one = costs.framework, None
        if any(program.rare for program in lowered.programs):
            one, times = round_of(lowered, priced, costs, times)
        return cls(
            lowered=lowered,
            priced=priced,
            start_s=times[0],
            end_s=times[1],
            step_sigma=framework.step_sigma,
            fitted=framework.whole_steps or not framework.flagged,
            schedule_params=schedule_params or {},
            round=one,
        )

    @cached_property
    def memory_order(self) -> Ordered | None:
        """Times of the memory events and their order; None for a graph without any."""
        events = self.lowered.graph.memory
        return None if events is None else ordered(events, self.start_s, self.end_s)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step, in the mean over a round, and over those in which a reference moves."""
        if self.swarm is not None:
            return self.swarm.mean_s
        own = float(self.end_s.max()) if self.round is None else self.round.mean_s
        return own if self.moving is None else own + self.share * self.moving.step_time_s
