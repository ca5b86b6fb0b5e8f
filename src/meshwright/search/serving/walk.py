"""The walk over candidates of a serving search: what is known of each, and the progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import NamedTuple

import msgspec

from meshwright.answer.lending import cannot_lend
from meshwright.answer.pairing import cannot_pair
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.quantity import seconds
from meshwright.search.serving.evaluate import Judged, ServingEvaluator
from meshwright.search.serving.found import FLOOR, MISSED, NO_ROOM, WORK, Loser
from meshwright.search.serving.pairs import pairs
from meshwright.search.serving.space import (
    REPLICAS,
    ROLES,
    TOGETHER,
    Phase,
    ServingCandidate,
    engines,
    layouts,
    most_replicas,
)
from meshwright.search.shown import ShownWalk
from meshwright.search.space import Space
from meshwright.search.walk import StopFlag, Stopped
from meshwright.spec.serve import EngineWords


class Line(NamedTuple):
    """Candidates that differ in the number of replicas alone."""

    where: int
    plan: Plan
    engine: EngineWords
    counts: tuple[int, ...]

    def at(self, replicas: int) -> ServingCandidate:
        """The candidate of so many replicas."""
        return ServingCandidate((Phase(self.plan, replicas),), self.engine, self.where)

    @property
    def phase(self) -> Phase:
        """One replica; as many as there may be where they lend one another blocks."""
        return Phase(self.plan, self.counts[-1] if self.engine.borrow else 1)


class ServingWalk(ShownWalk):
    """Every candidate is judged by simulation, or lost for a reason; where prompts and answers may be `apart`, so is
    every pair of layouts."""

    def __init__(
        self,
        evaluators: Sequence[ServingEvaluator],
        space: Sequence[Space],
        report: Callable | None = None,
        apart: bool = False,
    ):
        super().__init__(report)
        self.evaluators, self.stop = evaluators, StopFlag()
        self.lost: dict[ServingCandidate, tuple[str, str]] = {}
        self.judged: dict[ServingCandidate, Judged] = {}
        self._bounded: dict[tuple, tuple[str, str, int]] = {}
        self._roomless: dict[tuple, str] = {}
        self.best = ""
        self.lines = [
            Line(where, plan, engine, counts)
            for where, (evaluator, one) in enumerate(zip(evaluators, space))
            for plan in layouts(one, evaluator.model, evaluator.cluster, evaluator.serve)
            if TOGETHER in one[ROLES] and (counts := _counts(one, plan, evaluator))
            for engine in engines(one, evaluator.serve)
        ]
        self.pairs = [
            pair
            for where, (evaluator, one) in enumerate(zip(evaluators, space))
            if apart
            for pair in pairs(one, where, evaluator)
        ]
        self.covered = sum(len(line.counts) for line in self.lines) + len(self.pairs)

    @property
    def simulated(self) -> int:
        """Runs of the simulator."""
        return sum(evaluator.simulated for evaluator in self.evaluators)

    def of(self, line: Line | ServingCandidate) -> ServingEvaluator:
        """The evaluator of a candidate's cluster."""
        return self.evaluators[line.where]

    def lose(self, candidate: ServingCandidate, reason: str, why: str) -> None:
        """Note why a candidate is none of the best."""
        self.lost[candidate] = (reason, why)

    def excluded(self, line: Line, count: int) -> bool:
        """Whether a bound excludes so many replicas of a line, which are lost then. A line is priced when it is first
        asked of."""
        self.look()
        key = (line.where, line.plan, line.engine)
        if key not in self._bounded:
            self._bounded[key] = self._bounds(line)
        reason, why, least = self._bounded[key]
        if not reason and count < least:
            reason, why = WORK, f"at least {least} replicas can do the work in time (bound)"
        if reason:
            self.lose(line.at(count), reason, why)
        return bool(reason)

    def roomless(self, line: Line, count: int) -> bool:
        """Whether no replica of a line has room for its weights and a request; so many of them are lost then. Nothing
        is priced for it."""
        key = (line.where, line.plan, line.engine)
        if key not in self._roomless:
            self._roomless[key] = self.of(line).no_room(line.phase, line.engine)
        if self._roomless[key]:
            self.lose(line.at(count), NO_ROOM, self._roomless[key])
        return bool(self._roomless[key])

    def _bounds(self, line: Line) -> tuple[str, str, int]:
        """Why all of a line are excluded ("" where they are not), in words, and the least number of replicas."""
        evaluator = self.of(line)
        why = evaluator.no_room(line.phase, line.engine)
        if why:
            return NO_ROOM, why, 0
        bounds = evaluator.bounds(line.phase, line.engine)
        floor = next((floor for floor in bounds.floors() if floor.missed), None)
        if floor is not None:
            return FLOOR, f"{floor.why} (bound)", 0
        return "", "", bounds.least_replicas()

    def judge(self, candidate: ServingCandidate) -> Judged:
        """Simulate a candidate; one that misses an objective is lost."""
        self.look()
        found = self.judged.get(candidate)
        if found is None:
            found = self.judged[candidate] = self.of(candidate).judged(candidate)
            if not found.good:
                self.lose(candidate, MISSED, found.why)
        return found

    def losers(self, best: set[ServingCandidate]) -> tuple[Loser, ...]:
        """Every candidate that lost, in the order of the space."""
        return tuple(
            Loser(candidate=c, reason=reason, why=why, ratio=self.judged[c].ratio if c in self.judged else inf)
            for c, (reason, why) in self.lost.items()
            if c not in best
        )

    def look(self) -> None:
        """Show progress now and then.

        Raises:
            Stopped: somebody asked for the end.
        """
        if self.stop.asked:
            raise Stopped
        self.show()

    def progress(self) -> str:
        """``812 of 3,400 plans, 75 simulated, best 16 devices``."""
        done = len(self.lost.keys() | self.judged.keys())
        best = f", best {self.best}" if self.best else ""
        since = seconds(monotonic() - self.started)
        return f"{done:,} of {self.covered:,} plans, {self.simulated:,} simulated in {since}{best}"


def _counts(space: Space, plan: Plan, evaluator: ServingEvaluator) -> tuple[int, ...]:
    """The numbers of replicas of a plan that the space has and the cluster has room for."""
    most, least = most_replicas(plan, evaluator.cluster), 1
    words, step = evaluator.serve.engine, 1
    if words.borrow or words.pairs:
        least, step = 2, 2 if words.pairs else 1
        two = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, dp=2))
        if any((*cannot_lend(two, evaluator.model, evaluator.serve), *cannot_pair(two, evaluator.serve))):
            return ()
    return tuple(count for count in range(least, most + 1, step) if space.allows(REPLICAS, count))


def nothing_legal(model: str, where: str, serve: str) -> MeshwrightError:
    """R005 where no plan of the space is legal."""
    help = "leave out a word of --plan, which lets the search choose it, or name a cluster that a replica fits on"
    message = f"no serving plan of this space is legal for {model} on {where} with {serve}"
    return MeshwrightError.one("R005", message, help=help)
