"""Walk: what a strategy does to a space. It evaluates points, rejects regions with a reason, and everything is counted.

A strategy asks ``worth_s`` (a plan slower than this is not worth looking at) and says ``evaluate`` and ``reject``;
counts, the best plans so far, the store and the progress line are kept here, so every strategy has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from time import monotonic
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from meshwright.plan import Plan
from meshwright.plan.facets.feedback import CHAIN
from meshwright.search.bounds import CoreScope
from meshwright.search.engines import Runnable
from meshwright.search.evaluate import Evaluated, Evaluator
from meshwright.search.families import family
from meshwright.search.regions import Regions
from meshwright.search.settle import settled
from meshwright.search.shown import ShownWalk
from meshwright.search.space import Core, Inner, Piped, Space, State, cores

NO_ROOM = "does not fit: evaluated"
SLOWER = "slower: evaluated"


class Keeper(Protocol):
    """Store of finished walks as encoded texts, by what was asked."""

    def finished(self, asked: str) -> bytes | None: ...

    def finish(self, asked: str, walk: bytes) -> None: ...


class StopFlag:
    """Whether somebody ``asked`` for the end, and whether what they could end is ``over``."""

    asked = over = False


class Stopped(Exception):
    """The walk ends here: somebody wants it to."""


#: What a plan that nobody runs is worth.
UNRUNNABLE = Evaluated(float("inf"), float("-inf"))


class Tried(NamedTuple):
    """An evaluated plan."""

    plan: Plan
    step_time_s: float
    headroom_bytes: float


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Target of a walk: the best ``keep`` plans, or with ``families`` the best plans of the best ``keep``
    families, that leave ``room_bytes`` on the fullest rank, take at most ``cap_s`` and are ``runnable``. ``narrow``:
    what nobody runs leaves the space before anything is bounded, which pays where it is most of the space."""

    keep: int = 1
    families: bool = False
    room_bytes: float = 0.0
    cap_s: float = float("inf")
    runnable: Runnable | None = None
    narrow: bool = True


class Walk(ShownWalk):
    """The state of one search; with ``stopped`` set, the walk ends at its next look."""

    def __init__(
        self,
        space: Space,
        evaluator: Evaluator,
        *,
        keep: int = 1,
        known: dict[str, Evaluated] | None = None,
        record: Callable[[Plan, Evaluated], None] | None = None,
        report: Callable[[Walk], None] | None = None,
        wanted: Wanted | None = None,
        keeper: Keeper | None = None,
        what: str = "",
    ):
        self.space, self.evaluator = space, evaluator
        self.wanted = wanted or Wanted(keep=keep)
        self.keep = self.wanted.keep
        self.model, self.cluster, self.train = evaluator.model, evaluator.cluster, evaluator.train
        self.trained = evaluator.trained
        #: What a plan may take of the largest device.
        self.capacity_bytes = max(i.device.memory_bytes for i in self.cluster.islands) - self.wanted.room_bytes
        self.known = known or {}
        super().__init__(report)
        self._record = record
        #: What keeps finished walks (``search/finished.py``).
        self.keeper = keeper
        self.recalled = False
        self.tried: dict[tuple, Tried] = {}
        self.refused: set[tuple] = set()
        self._plans: dict[Plan, Evaluated] = {}
        self.rejected: Counter[str] = Counter()
        self.covered = self.bounded = 0
        #: When plans of the space were counted last: until all are, nobody knows how much is left.
        self.grown_s = -np.inf
        self.stop = StopFlag()
        self.ended = False
        #: What this walk is for, where it is not the search itself.
        self.what = what
        self._listed: dict[Core, list[CoreScope]] = {}
        self._best: dict[Any, float] = {}
        self._worth_s = self.wanted.cap_s

    def again(self, wanted: Wanted, what: str) -> Walk:
        """Another walk over the same space, which knows what this one evaluated and ends when this one would."""
        other = Walk(
            self.space,
            self.evaluator,
            known=self.known | {plan.text(): answer for plan, answer in self._plans.items()},
            record=self._record,
            report=self._report,
            wanted=wanted,
            keeper=self.keeper,
            what=what,
        )
        other.stop, other.regions, other.cores = self.stop, self.regions, self.cores
        if self.wanted.runnable is None:
            other._listed = self._listed
        return other

    @property
    def stopped(self) -> bool:
        """Whether somebody wants the walk to end."""
        return self.stop.asked

    @stopped.setter
    def stopped(self, asked: bool) -> None:
        self.stop.asked = asked

    @cached_property
    def regions(self) -> Regions:
        """Intermediate results that the bounds of regions share, kept from region to region."""
        return Regions(self.evaluator, chain={*(self.space["feedback"] or ())} <= {CHAIN})

    @cached_property
    def cores(self) -> list[Core]:
        """The legal cores of the space."""
        return list(cores(self.space, self.model, self.cluster, self.train))

    def scopes(self, core: Core) -> list[CoreScope]:
        """The regions of a core: all its plans, or those that an engine may run."""
        runnable = self.wanted.runnable if self.wanted.narrow else None
        if runnable is None:
            return self._whole(core)
        return [scope for space in runnable.narrowed(self.space, core) for scope in self._scopes(space, core)]

    def _whole(self, core: Core) -> list[CoreScope]:
        found = self._listed.get(core)
        if found is None:
            found = self._listed[core] = self._scopes(self.space, core)
        return found

    def _scopes(self, space: Space, core: Core) -> list[CoreScope]:
        whole = CoreScope.of(space, core, self.trained, self.cluster, self.train)
        return [scope for scope in whole.parts() if scope.size()]

    def lists(self, core: Core) -> list[CoreScope]:
        """:meth:`scopes`, and all plans of the core counted."""
        scopes = self.scopes(core)
        left, size = (sum(scope.size() for scope in found) for found in (scopes, self._whole(core)))
        self.covers(max(size, left))
        if left < size:
            self.reject(f"{self.wanted.runnable.label} cannot run it", size - left)
        return scopes

    @property
    def worth_s(self) -> float:
        """The slowest step time of a plan that would still be kept."""
        return self._worth_s

    def worth_of(self, core: Core, inner: Inner, piped: Piped, state: State) -> float:
        """The slowest step time of a point that would still be kept: of a family nothing but the best is."""
        if not self.wanted.families:
            return self._worth_s
        return min(self._worth_s, self._best.get(family(core, piped, state), np.inf))

    @property
    def best_s(self) -> float:
        """The best so far: seconds."""
        return min(self._best.values(), default=np.inf)

    def covers(self, count: int) -> None:
        self.covered += count
        self.grown_s = monotonic()
        self._tick()

    def bounds(self, count: int) -> None:
        self.bounded += count

    def reject(self, reason: str, count: int) -> None:
        """`count` plans are out, all for the same reason."""
        if count:
            self.rejected[reason] += count
        self._tick()

    def evaluate(self, core: Core, inner: Inner, piped: Piped, state: State) -> Evaluated:
        """The step time and the headroom of one point, infinitely slow where nobody runs it; a point is evaluated
        once."""
        point = (core, inner, piped, state)
        found = self.tried.get(point)
        if found is None:
            plan = settled(*point, self.evaluator)
            if point in self.refused or not self._runs(point, plan):
                return UNRUNNABLE
            again = self._plans.get(plan)  # even and balanced may come to the same
            answer = again or self.known.get(plan.text()) or self.evaluator(plan)
            found = self.tried[point] = Tried(plan, *answer)
            if again is None:
                self._plans[plan] = answer
                if self._record is not None:
                    self._record(plan, answer)
                if self.fits(found):
                    self._keep(family(core, piped, state) if self.wanted.families else plan, answer.step_time_s)
        self._tick()
        return Evaluated(found.step_time_s, found.headroom_bytes)

    def fits(self, tried: Tried) -> bool:
        """Whether a plan leaves the room that is wanted."""
        return tried.headroom_bytes >= self.wanted.room_bytes

    def _runs(self, point: tuple, plan: Plan) -> bool:
        why = self.wanted.runnable.why_not(plan) if self.wanted.runnable else ""
        if why:
            self.refused.add(point)
            self.reject(why, 1)
        return not why

    def _keep(self, entry: Any, step_time_s: float) -> None:
        """A plan or a family, as `entry`, has a plan this fast."""
        if step_time_s >= min(self._best.get(entry, np.inf), self._worth_s):
            return
        self._best[entry] = step_time_s
        if len(self._best) >= self.keep:
            kept = sorted(self._best.items(), key=lambda item: item[1])[: self.keep]
            self._best, self._worth_s = dict(kept), min(kept[-1][1], self.wanted.cap_s)

    def _tick(self) -> None:
        """Look up from the work: whether to go on, and whether to say how far it is.

        Raises:
            Stopped: somebody wants the walk to end.
        """
        if self.stopped:
            raise Stopped
        self.show()

    def fitting(self) -> list[Tried]:
        """Evaluated plans that fit, best first; of equally good ones, the one with fewer words."""
        fits = {t.plan: t for t in self.tried.values() if self.fits(t)}
        return sorted(fits.values(), key=self._place)

    def _place(self, tried: Tried) -> tuple[float, int, str]:
        text = tried.plan.text()
        return tried.step_time_s, len(text.split()), text

    def counts(self) -> dict[str, int]:
        """Why plans were rejected, the evaluated ones too. A plan that was evaluated before its region was rejected
        counts as evaluated."""
        fits = sum(map(self.fits, self.tried.values()))
        out = self.rejected.copy()
        twice = max(0, out.total() + len(self.tried) - self.covered)
        if twice and out:  # a plan that was looked at first may be all there is
            out[max(out, key=lambda reason: out[reason])] -= twice
        out[NO_ROOM] = len(self.tried) - fits
        out[SLOWER] = max(0, fits - self.keep)
        return {reason: count for reason, count in out.items() if count}
