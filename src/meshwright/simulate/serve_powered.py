"""Servers of a row behind one power supply: a governor that drives the power policy of the row."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from meshwright.cost.part import DevicePart
from meshwright.cost.power import Draw
from meshwright.serving.polca import Polca
from meshwright.serving.power import PowerSeen
from meshwright.simulate.serve_governed import Used
from meshwright.world.decider import LogEntry

#: Seconds between two looks at the power of a row.
POWER_LOOK_S = 2.0
#: The state of a policy in which the brake is on.
BRAKED = 3


class CappedRow:
    """A governor of replicas, each on so many ``devices`` that draw what `draw` says, with ``host_w`` beside each. The
    first ``num_low`` of them are of low priority. Together they may draw ``budget_w``. Clocks are capped or free
    ``acts_s`` after that was decided, and braked at once.

    ``peak_w`` is the most that was drawn between two looks, ``joules`` what was drawn in all ``seconds``, and
    ``passed_s`` the seconds in each state of the policy."""

    every_s = POWER_LOOK_S
    arithmetic = True

    def __init__(
        self,
        policy: Polca,
        draw: Draw,
        *,
        devices: int,
        host_w: float,
        replicas: int,
        num_low: int,
        budget_w: float,
        acts_s: float = 0.0,
    ):
        self.policy, self.draw, self.devices, self.host_w = policy, draw, devices, host_w
        self.replicas, self.num_low, self.budget_w = replicas, num_low, budget_w
        self.acts_s, self.coming = acts_s, deque[tuple[float, int]]()
        self.state = self.acting = policy.begin()
        self.peak_w = self.joules = self.seconds = 0.0
        self.passed_s = [0.0] * 4
        self.log: list[LogEntry] = []

    def part(self, which: int) -> DevicePart:
        """Return what a replica has of its devices: their clock."""
        cap = self.policy.cap(self.acting)
        clock = cap.low if which < self.num_low else cap.high
        return DevicePart() if clock == 1.0 else DevicePart(clock=clock)

    def watts(self, used: Sequence[Used], seconds: float) -> float:
        """Return the mean power of the row over a time."""
        each = (self.draw.watts(one.operations / seconds, one.traffic / seconds) for one in used)
        return self.devices * (sum(each) + self.host_w * len(used))

    def looked(self, start_s: float, end_s: float, used: Sequence[Used]) -> Sequence[int]:
        """Take note of the power, and let the policy decide; returns all replicas where clocks are others."""
        drawn = self._noted(end_s - start_s, used)
        event, before = PowerSeen(drawn / self.budget_w), self.acting
        self.state, decisions = self.policy.decide(self.state, event)
        self.log.append(LogEntry(event, decisions, end_s))
        if decisions:
            self.coming.append((end_s if self.state == BRAKED else end_s + self.acts_s, self.state))
        while self.coming and (self.coming[0][0] <= end_s or self.coming[-1][1] == BRAKED):
            self.acting = self.coming.popleft()[1]
        return range(self.replicas) if self.acting != before else ()

    def ended(self, start_s: float, end_s: float, used: Sequence[Used]) -> None:
        """Take note of the rest."""
        if end_s > start_s:
            self._noted(end_s - start_s, used, whole=False)

    def _noted(self, seconds: float, used: Sequence[Used], *, whole: bool = True) -> float:
        drawn = self.watts(used, seconds)
        self.peak_w = max(self.peak_w, drawn) if whole else self.peak_w or drawn
        self.joules, self.seconds = self.joules + drawn * seconds, self.seconds + seconds
        self.passed_s[self.acting] += seconds
        return drawn
