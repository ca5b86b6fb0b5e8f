"""Rounds that grow as the learning rate falls: their length is the square of a ratio to it.

Replicas that step apart drift from each other by some learning rate times their steps; the quadratic synchronisation
rule (Gu et al. 2310.14423) has ``max(h, floor((growth / rate)^2))`` steps in a round, by the learning rate at the
round's beginning, and in the warm-up those of the step after it.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import msgspec

from meshwright.spec.decay import rate_at


class GrowingRounds(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of at least ``least`` steps, longer as the learning rate falls: from its ``peak``, after ``warmup`` steps,
    along a ``schedule`` to ``floor`` of itself at the end of all ``steps``. ``growth`` is the learning rate at which a
    round has one step by the rule. All replicas meet after the last step, and after every one behind it."""

    least: int
    growth: float
    peak: float
    steps: int
    warmup: int = 0
    floor: float = 0.0
    schedule: str = "cosine"

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return rate_at(
            step, self.peak, warmup=self.warmup, decay_steps=self.steps, schedule=self.schedule, floor=self.floor
        )

    def length_at(self, step: int) -> int:
        """Return the steps of a round that begins after so many, were there no end."""
        rate = self.rate_at(max(step, self.warmup))
        longest = self.steps + self.least  # no round is longer than all steps
        return max(self.least, int(min((self.growth / rate) ** 2, longest)) if rate > 0 else longest)

    @property
    def ends(self) -> tuple[int, ...]:
        """The steps after which a round ends, the last of which is that of all steps."""
        return _ends(self)

    @property
    def mean(self) -> float:
        """Steps of a round, in the mean over all rounds."""
        return self.steps / len(self.ends)

    def rounds_by(self, step: int) -> int:
        """Return how many rounds have ended after so many steps."""
        return bisect_right(self.ends, step) + max(0, step - self.steps)

    def ended(self, step: int) -> bool:
        """Return whether so many steps are whole rounds."""
        return step == 0 or self.rounds_by(step) > self.rounds_by(step - 1)


@lru_cache(maxsize=64)
def _ends(growth: GrowingRounds) -> tuple[int, ...]:
    ends, step = [], 0
    while step < growth.steps:
        step = min(step + growth.length_at(step), growth.steps)
        ends.append(step)
    return tuple(ends)
