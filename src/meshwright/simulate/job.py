"""The level above the step: a training job over days, on a virtual clock, where nodes fail and speeds change.

The driver asks a decider (:mod:`meshwright.world.recovery`) what to do, lets the world happen, and adds up where the
time goes. Between two events nothing is decided, so that any number of steps and checkpoints is one addition: a job
costs as much as it has failures. Steps are whole only where a checkpoint counts them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain, repeat
from math import ceil, exp, expm1, floor, inf

import msgspec

from meshwright.causes import JOB
from meshwright.errors import MeshwrightError
from meshwright.world.decider import Decider, LogEntry
from meshwright.world.elastic import NEWEST, Regroup
from meshwright.world.recovery import Began, Ended, Event, Failed, Finish, Repaired, Restart, Restarted, TrainFrom, Wait
from meshwright.world.trace import WorldEvent

#: A job that takes so many times what it would without failures does not get anywhere.
HOPELESS = 1000.0

#: Mean failures in a stretch that has to be done in one go, beyond which it never is: e^700 is no number any more.
MOST_FAILURES = 700.0


#: The part of a stretch between two kept steps that is taken for none of it.
AT_ONCE = 1e-6


class JobSizes(msgspec.Struct, frozen=True, kw_only=True):
    """A job's sizes: ``num_steps`` of ``step_s`` seconds each, ``save_s`` for a checkpoint, during which training
    stands still, ``restart_s`` from a failure to the next step, ``repair_s`` until a failed node is back. A checkpoint
    counts ``flush_s`` after training went on, where it is written beside it. ``step_of`` are the seconds of a step on
    fewer nodes, by their number, and ``regroup_s`` what it takes to go on with another number of them (``shrink_s``
    with fewer, where that is said). ``in_rounds``: a node that is back joins when the steps until the next that is kept
    are done, so that none is done again."""

    num_steps: int
    step_s: float
    save_s: float
    restart_s: float
    repair_s: float
    flush_s: float = 0.0
    regroup_s: float = 0.0
    shrink_s: float | None = None
    in_rounds: bool = False
    step_of: dict[int, float] = {}


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """One job as it went: ``seconds`` in all, ``by_cause`` (steps and checkpoints that counted, work and checkpoints
    that were lost, restarts, waiting for a repair), how many ``failures`` it met, and the decider's log."""

    seconds: float
    by_cause: dict[str, float]
    failures: int
    log: tuple[LogEntry, ...]


class Stretch:
    """Training from one step on: ``num_steps`` and a checkpoint after every ``every`` of them and after the last.

    Its place is told in *nominal* seconds, which pass as the clock does while nothing is slow; a slowdown stretches
    steps and not checkpoints.
    """

    def __init__(self, job: JobSizes, num_steps: int, every: int):
        self.step_s, self.save_s, self.every = job.step_s, job.save_s, every
        self.work_s = every * job.step_s
        self.cycle_s = self.work_s + job.save_s
        self.saves = ceil(num_steps / every)
        self.flush_s = job.flush_s
        self.num_steps = num_steps
        self.end_s = num_steps * job.step_s + self.saves * job.save_s

    def elapsed_s(self, place: float, slowdown: float) -> float:
        """Seconds from the beginning to a place."""
        cycles = floor(place / self.cycle_s)
        rest = place - cycles * self.cycle_s
        # the last cycle may have fewer steps: its checkpoint follows them
        work = min(rest, self.work_s, max(0.0, self.num_steps * self.step_s - cycles * self.work_s))
        return cycles * (self.work_s * slowdown + self.save_s) + work * slowdown + (rest - work)

    def place_at(self, elapsed_s: float, slowdown: float) -> float:
        """The place so many seconds from the beginning; the inverse of :meth:`elapsed_s`."""
        cycle = self.work_s * slowdown + self.save_s
        cycles = min(floor(elapsed_s / cycle), self.saves)
        rest = elapsed_s - cycles * cycle
        work = min(self.work_s, max(0.0, self.num_steps * self.step_s - cycles * self.work_s))
        done = rest / slowdown if rest <= work * slowdown else work + rest - work * slowdown
        return min(cycles * self.cycle_s + done, self.end_s)

    def left_s(self, place: float, slowdown: float) -> float:
        """Seconds from a place until the next one at which steps are kept; 0 right behind one."""
        target = min(ceil(place / self.cycle_s - AT_ONCE) * self.cycle_s, self.end_s)
        if target <= place:
            return 0.0
        return self.elapsed_s(target, slowdown) - self.elapsed_s(place, slowdown) + AT_ONCE / 2 * self.cycle_s

    def saved(self, place: float) -> tuple[int, float]:
        """Steps in checkpoints at a place, and the place where the last of these was complete."""
        if place >= self.end_s:
            return self.num_steps, self.end_s
        cycles = max(0, min(floor((place - self.flush_s) / self.cycle_s), self.saves - 1))
        return cycles * self.every, cycles * self.cycle_s


def run_job(job: JobSizes, decider: Decider, changes: Iterator[WorldEvent]) -> JobRun:
    """The job from its first step to its last, while `changes` happen.

    Raises:
        MeshwrightError: O003 when failures leave the job no time to reach its next checkpoint.
    """
    return _Driver(job, decider, changes).run()


class _Driver:
    """The virtual clock of a job: ``now_s``, the job's present activity with its end, and the world's next event."""

    def __init__(self, job: JobSizes, decider: Decider, changes: Iterator[WorldEvent]):
        self.job, self.decider, self.sizes = job, decider, job
        self.changes = chain(changes, repeat(WorldEvent(float("inf"))))
        self.next = next(self.changes)
        self.now_s, self.slowdown, self.saved_steps, self.failures = 0.0, 1.0, 0, 0
        self.repairs: list[float] = []
        self.nodes = max(job.step_of, default=0)
        self.spent = {cause.name: 0.0 for cause in JOB}
        self.stretch: Stretch | None = None
        self.place = self.kept_place = self.begun_s = self.until_s = 0.0
        self.doing: type = Wait
        self.log: list[LogEntry] = []

    def run(self) -> JobRun:
        state, event = self.decider.begin(), Began()
        limit = HOPELESS * (self.job.num_steps * (self.job.step_s + self.job.save_s) + self.job.restart_s)
        while True:
            state, decisions = self.decider.decide(state, event)
            self.log.append(LogEntry(event, decisions, self.now_s))
            for decision in decisions:
                if isinstance(decision, Finish):
                    return JobRun(seconds=self.now_s, by_cause=self.spent, failures=self.failures, log=tuple(self.log))
                self._start(decision)
            event = self._happens()
            if self.now_s > limit:
                raise self._hopeless()

    def _start(self, decision: TrainFrom | Restart | Regroup | Wait) -> None:
        if self.stretch is not None:  # another number of nodes takes over while all is well
            self._stops(self.now_s)
        self.begun_s, self.doing, self.stretch = self.now_s, type(decision), None
        if isinstance(decision, TrainFrom):
            first = self.saved_steps if decision.first_step == NEWEST else decision.first_step
            left = self.job.num_steps - first
            self.stretch = Stretch(self.sizes, left, min(decision.save_every, max(left, 1)))
            self.first_step, self.place, self.kept_place, self.kept_s = first, 0.0, 0.0, self.now_s
        regroup_s = self.job.regroup_s
        if isinstance(decision, Regroup):
            shrinks, self.nodes = decision.nodes < self.nodes, decision.nodes
            regroup_s = self.job.shrink_s if shrinks and self.job.shrink_s is not None else regroup_s
            step_s = self.job.step_of.get(decision.nodes, self.job.step_s)
            self.sizes = msgspec.structs.replace(self.job, step_s=step_s)
        ends = {Restart: self.now_s + self.job.restart_s, Regroup: self.now_s + regroup_s, Wait: inf}
        self.until_s = ends.get(self.doing, 0.0)

    def _happens(self) -> Event:
        """The next thing that the decider is told."""
        while True:
            end = self._end_s()
            repair = self.repairs[0] if self.repairs else float("inf")
            if end <= repair and end <= self.next.at_s:
                return self._done(end)
            if repair <= self.next.at_s:
                self._pass(repair)
                self.repairs.pop(0)
                left_s = self.stretch.left_s(self.place, self.slowdown) if self.stretch and self.job.in_rounds else 0.0
                if left_s > 0:
                    insort(self.repairs, repair + left_s)
                    continue
                if self.doing is Wait:
                    self.spent["waiting"] += self.now_s - self.begun_s
                    self.begun_s = self.now_s
                return Repaired()
            change, self.next = self.next, next(self.changes)
            if change.slowdown is not None:
                self._pass(change.at_s)
                self.slowdown = change.slowdown
            elif self.doing is not Wait:  # the nodes of a job that waits are not used, and none is told to fail
                return self._fails(change)

    def _end_s(self) -> float:
        """The time at which the job's present activity ends, if no event comes between."""
        if self.stretch is None:
            return self.until_s
        whole = self.stretch.elapsed_s(self.stretch.end_s, self.slowdown)
        return self.now_s + whole - self.stretch.elapsed_s(self.place, self.slowdown)

    def _pass(self, at_s: float) -> None:
        """Let the clock run to a time before which nothing else happens."""
        if self.stretch is not None:
            before = self.stretch.elapsed_s(self.place, self.slowdown)
            place = self.stretch.place_at(before + at_s - self.now_s, self.slowdown)
            _, kept = self.stretch.saved(place)
            if kept > self.kept_place:  # complete by now, though training may have gone on since it was begun
                self.kept_s = self.now_s + self.stretch.elapsed_s(kept, self.slowdown) - before
                self.kept_place = kept
            self.place = place
        self.now_s = at_s

    def _done(self, at_s: float) -> Event:
        if self.stretch is None:
            self.now_s = at_s
            self.spent["restarts"] += self.now_s - self.begun_s
            return Restarted()
        self._pass(at_s)
        self.place = self.stretch.end_s
        self._count(self.stretch.num_steps, self.stretch.saves, at_s)
        self.now_s += self.job.flush_s  # the last checkpoint has to be written
        self.spent["checkpoints"] += self.job.flush_s
        return Ended()

    def _fails(self, change: WorldEvent) -> Failed:
        at_s = change.at_s
        self.failures += 1
        self._pass(at_s)
        if self.stretch is not None:
            self._stops(at_s)
        else:
            self.spent["restarts"] += at_s - self.begun_s
        insort(self.repairs, at_s + self.job.repair_s if change.back_s is None else change.back_s)
        return Failed(self.saved_steps)

    def _stops(self, at_s: float) -> None:
        """Training is broken off: what is in checkpoints counts, and the rest is lost."""
        steps, _ = self.stretch.saved(self.place)
        self._count(steps, ceil(steps / self.stretch.every), self.kept_s)
        self.spent["lost"] += at_s - self.kept_s
        self.stretch = None

    def _count(self, steps: int, saves: int, kept_s: float) -> None:
        """Book what counts of a stretch: its steps in checkpoints, which were complete at `kept_s`."""
        self.saved_steps = self.first_step + steps
        self.spent["checkpoints"] += saves * self.job.save_s
        self.spent["steps"] += kept_s - self.begun_s - saves * self.job.save_s

    def _hopeless(self) -> MeshwrightError:
        return MeshwrightError.one(
            "O003",
            f"after {self.now_s / 86_400:,.0f} days and {self.failures:,} failures {self.saved_steps:,} of "
            f"{self.job.num_steps:,} steps are done",
            help="save more often, restart faster, have more spares, or use fewer nodes",
        )


def expected_s(job: JobSizes, save_every: int, mtbf_s: float) -> float:
    """Mean seconds of a job whose failures come at random, one in `mtbf_s` on average, with a spare for each.

    A stretch of t seconds that a failure makes begin anew after a restart of R, which may fail too, takes
    M e^(R/M) (e^(t/M) - 1) on average (Daly, 2006, doi 10.1016/j.future.2004.11.016, section 2.2); a job is as many of
    them as it saves. Infinite where no stretch can be hoped to end.
    """
    every = min(save_every, job.num_steps)
    whole, rest = divmod(job.num_steps, every)

    def stretch(steps: int) -> float:
        length = steps * job.step_s + job.save_s
        if (job.restart_s + length) / mtbf_s > MOST_FAILURES:
            return inf
        return mtbf_s * exp(job.restart_s / mtbf_s) * expm1(length / mtbf_s)

    return whole * stretch(every) + (stretch(rest) if rest else 0.0)
