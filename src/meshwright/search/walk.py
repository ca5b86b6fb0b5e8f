"""Walk: what a strategy does to a space. It evaluates points, rejects regions with a reason, and everything is counted.

A strategy asks ``worth_s`` (a plan slower than this is not worth looking at) and says ``evaluate`` and ``reject``;
counts, the best plans so far, the store and the progress line are kept here, so every strategy has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from time import monotonic
from typing import NamedTuple

import numpy as np

from meshwright.plan import Plan
from meshwright.search.evaluate import Evaluated, Evaluator
from meshwright.search.settle import settled
from meshwright.search.space import Core, Inner, Piped, Space, State, cores

#: Seconds between looks at the progress, and between lines of it where they stay.
LOOK_S, LINES_S = 0.2, 5.0
NO_ROOM = "does not fit: evaluated"
SLOWER = "slower: evaluated"


class Stopped(Exception):
    """The walk ends here: somebody wants it to."""


class Tried(NamedTuple):
    """An evaluated plan."""

    plan: Plan
    step_time_s: float
    headroom_bytes: float


class Walk:
    """The state of one search. ``keep`` plans are wanted; with ``stopped`` set, the walk ends at its next look."""

    def __init__(
        self,
        space: Space,
        evaluator: Evaluator,
        *,
        keep: int,
        known: dict[str, Evaluated] | None = None,
        record: Callable[[Plan, Evaluated], None] | None = None,
        report: Callable[[Walk], None] | None = None,
    ):
        self.space, self.evaluator, self.keep = space, evaluator, keep
        self.model, self.cluster, self.train = evaluator.model, evaluator.cluster, evaluator.train
        self.capacity_bytes = float(max(i.device.memory_bytes for i in self.cluster.islands))
        self.known = known or {}
        self._record, self._report = record, report
        self.tried: dict[tuple, Tried] = {}
        self._plans: dict[Plan, Evaluated] = {}
        self.rejected: Counter[str] = Counter()
        self.covered = self.bounded = 0
        self.stopped = False
        self.ended = False
        self.started = self._shown = self._told = monotonic()
        self._best: list[float] = []

    @cached_property
    def cores(self) -> list[Core]:
        """The legal cores of the space."""
        return list(cores(self.space, self.model, self.cluster, self.train))

    @property
    def worth_s(self) -> float:
        """The slowest step time of a plan that would still be kept."""
        return self._best[self.keep - 1] if len(self._best) >= self.keep else np.inf

    @property
    def best_s(self) -> float:
        """The best so far: seconds."""
        return self._best[0] if self._best else np.inf

    def covers(self, count: int) -> None:
        self.covered += count
        self._tick()

    def bounds(self, count: int) -> None:
        self.bounded += count

    def reject(self, reason: str, count: int) -> None:
        """`count` plans are out, all for the same reason."""
        if count:
            self.rejected[reason] += count
        self._tick()

    def evaluate(self, core: Core, inner: Inner, piped: Piped, state: State) -> Evaluated:
        """The step time and the headroom of one point; a point is evaluated once."""
        point = (core, inner, piped, state)
        found = self.tried.get(point)
        if found is None:
            plan = settled(*point, self.evaluator)
            again = self._plans.get(plan)  # even and balanced may come to the same
            answer = again or self.known.get(plan.text()) or self.evaluator(plan)
            found = self.tried[point] = Tried(plan, *answer)
            if again is None:
                self._plans[plan] = answer
                if self._record is not None:
                    self._record(plan, answer)
                if answer.fits:
                    self._best = sorted([*self._best, answer.step_time_s])[: self.keep]
        self._tick()
        return Evaluated(found.step_time_s, found.headroom_bytes)

    def _tick(self) -> None:
        """Look up from the work: whether to go on, and whether to say how far it is.

        Raises:
            Stopped: somebody wants the walk to end.
        """
        if self.stopped:
            raise Stopped
        now = monotonic()
        if self._report is not None and now - self._shown > LOOK_S:
            self._shown = now
            self._report(self)

    def due(self) -> bool:
        """Whether it is time for another line where lines stay: every few seconds."""
        now = monotonic()
        if now - self._told < LINES_S:
            return False
        self._told = now
        return True

    def end(self) -> None:
        """The walk is over, for whoever shows its progress."""
        self.ended = True
        if self._report is not None:
            self._report(self)

    def fitting(self) -> list[Tried]:
        """Evaluated plans that fit, best first; of equally good ones, the one with fewer words."""
        fits = {t.plan: t for t in self.tried.values() if t.headroom_bytes >= 0}
        return sorted(fits.values(), key=self._place)

    def _place(self, tried: Tried) -> tuple[float, int, str]:
        text = tried.plan.text()
        return tried.step_time_s, len(text.split()), text

    def counts(self) -> dict[str, int]:
        """Why plans were rejected, the evaluated ones too. A plan that was evaluated before its region was rejected
        counts as evaluated."""
        fits = sum(t.headroom_bytes >= 0 for t in self.tried.values())
        out = self.rejected.copy()
        twice = max(0, out.total() + len(self.tried) - self.covered)
        if twice:
            out[max(out, key=lambda reason: out[reason])] -= twice
        out[NO_ROOM] = len(self.tried) - fits
        out[SLOWER] = max(0, fits - self.keep)
        return {reason: count for reason, count in out.items() if count}
