"""Rollouts and training steps on one virtual clock: replicas generate, the decider of rollout control says what, and a
step takes what its groups have to be trained on.

Generation in waves is simulated wave by wave, each on all replicas from the same time on. Generation that never waits
runs in the pool of replicas of the serving simulator: new parameters end the iteration under way of each of them, and
the next one, in which everything in the cache is computed again, begins when they are loaded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from meshwright.serving.batching import Iterate
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.routing import Router
from meshwright.simulate.iteration_time import Took
from meshwright.simulate.serve_plain import IDLE, Clock
from meshwright.simulate.serve_pool import MOVES, ReplicaPool, RolesAlike
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.requests import Requests
from meshwright.world.decider import LogEntry
from meshwright.world.rollouts import (
    AskGroups,
    GroupsEnded,
    LoadParameters,
    ParametersLoaded,
    RolloutControl,
    StepTrained,
    TrainGroups,
)


class RolloutJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of so many training ``steps``: its control, the ``requests`` (``samples`` in a row are a group, in the
    order in which groups are asked for), the seconds in which so many tokens are trained on, and those in which new
    parameters are sent and loaded, in which neither side does anything else."""

    control: RolloutControl
    steps: int
    samples: int
    requests: Requests
    train_s: Callable[[int], float]
    load_s: float


class RolledStep(NamedTuple):
    """A training step: when it had its groups and began, and ended; its tokens (prompts and answers) and those of
    answers, the ages of its groups in versions, and until then the seconds in which a replica was not idle, summed over
    replicas."""

    begin_s: float
    end_s: float
    tokens: int
    answered: int
    stale: tuple[int, ...]
    generating_s: float


class RolledOut(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was simulated: its ``steps``, the groups asked for and ended, in how many trajectories new parameters
    came (``interrupted``, one for each time) and the tokens that were computed again for that. ``log`` is the
    decider's."""

    steps: tuple[RolledStep, ...]
    asked: int
    ended: int
    left: int
    interrupted: int
    recomputed: int
    log: tuple[LogEntry, ...]


class Generating(Protocol):
    """The replicas as a job sees them."""

    @property
    def interrupted(self) -> int:
        """Answers during which new parameters came, one for each time."""

    @property
    def recomputed(self) -> int:
        """Tokens computed again for that."""

    def ask(self, first: int, count: int, now: float) -> None:
        """Generate the answers of so many groups from now on."""

    def load(self, now: float, until_s: float) -> None:
        """Load new parameters, until when nothing is generated."""

    def busy_s(self, now: float) -> float:
        """Return the seconds until now in which replicas were not idle, summed over them."""


class TrainingSide:
    """The training steps and the control of a job; ``generating`` is told what to do."""

    def __init__(self, job: RolloutJob, generating: Generating):
        self.job, self.generating = job, generating
        self.state = job.control.begin()
        self.ends = self.loaded = inf
        self.free_s = 0.0
        self.under_way: tuple[float, TrainGroups] | None = None
        self.steps: list[RolledStep] = []
        self.log: list[LogEntry] = []
        self.ended = 0
        each = job.samples
        both = job.requests.prompt + job.requests.output
        self.tokens, self.answers = (column.reshape(-1, each).sum(axis=1) for column in (both, job.requests.output))

    @property
    def done(self) -> bool:
        """Whether all steps have been trained."""
        return len(self.steps) >= self.job.steps

    @property
    def due(self) -> float:
        """When something is next that no answer has to do with."""
        return min(self.ends, self.loaded)

    def tell(self, event: GroupsEnded | StepTrained | ParametersLoaded, now: float) -> None:
        """Tell the control what happened, and do what it decides."""
        self.ended += len(event.groups) if isinstance(event, GroupsEnded) else 0
        self.state, decisions = self.job.control.decide(self.state, event)
        self.log.append(LogEntry(event, decisions, now))
        for decision in decisions:
            if isinstance(decision, AskGroups):
                self.generating.ask(decision.first, decision.count, now)
            elif isinstance(decision, TrainGroups):
                begin = max(now, self.free_s)
                self.under_way = begin, decision
                self.ends = begin + self.job.train_s(int(self.tokens[list(decision.groups)].sum()))
            elif isinstance(decision, LoadParameters):
                self.loaded = now + self.job.load_s
                self.generating.load(now, self.loaded)

    def advance(self, now: float) -> None:
        """Let everything happen that is due by now."""
        while self.due <= now and not self.done:
            if self.loaded <= self.ends:
                at, self.loaded = self.loaded, inf
                self.tell(ParametersLoaded(), at)
            else:
                at, self.ends = self.ends, inf
                self._trained(at)
                self.free_s = at + self.job.load_s
                if not self.done:
                    self.tell(StepTrained(), at)

    def _trained(self, at: float) -> None:
        assert self.under_way is not None
        begin, step = self.under_way
        groups = list(step.groups)
        tokens, answered = int(self.tokens[groups].sum()), int(self.answers[groups].sum())
        self.steps.append(RolledStep(begin, at, tokens, answered, step.stale, self.generating.busy_s(at)))

    def result(self) -> RolledOut:
        """Return what became of the job."""
        generating, state = self.generating, self.state
        return RolledOut(
            steps=tuple(self.steps),
            asked=state.asked,
            ended=self.ended,
            left=len(state.heads),
            interrupted=generating.interrupted,
            recomputed=generating.recomputed,
            log=tuple(self.log),
        )


class Waves:
    """Waves of groups on replicas: ``serve`` says which requests each replica has, and what becomes of them."""

    interrupted = recomputed = 0

    def __init__(self, job: RolloutJob, serve: Callable[[Requests], tuple[list[Requests], list[ServedRequests]]]):
        self.job, self.serve = job, serve
        self.ends: list[tuple[float, int]] = []
        self.begun = 0.0
        self.took: list[float] = []
        self.before = 0.0

    def ask(self, first: int, count: int, now: float) -> None:
        """Generate the answers of so many groups from now on."""
        each = self.job.samples
        which = np.arange(first * each, (first + count) * each)
        wave = self.job.requests.chosen(which)
        shares, served = self.serve(msgspec.structs.replace(wave, line=which, arrival_s=np.zeros(len(which))))
        end = np.zeros(len(which))
        for share, one in zip(shares, served):
            end[share.line - first * each] = one.end_s
        self.before += sum(self.took)
        self.begun, self.took = now, [float(one.end_s.max()) for one in served]
        groups = end.reshape(-1, each).max(axis=1)
        self.ends = [(now + float(at), first + i) for i, at in enumerate(groups)]
        heapq.heapify(self.ends)

    def load(self, now: float, until_s: float) -> None:
        """Nothing: no wave is under way, and none is asked for until then."""

    def busy_s(self, now: float) -> float:
        """Return the seconds until now in which replicas were not idle, summed over them."""
        return self.before + sum(min(took, now - self.begun) for took in self.took)


def in_waves(job: RolloutJob, serve: Callable[[Requests], tuple[list[Requests], list[ServedRequests]]]) -> RolledOut:
    """Simulate a job whose control asks for groups in waves."""
    waves = Waves(job, serve)
    side = TrainingSide(job, waves)
    side.loaded = 0.0
    while not side.done:
        now = min(side.due, waves.ends[0][0] if waves.ends else inf)
        side.advance(now)
        ended = []
        while waves.ends and waves.ends[0][0] <= now:
            ended.append(heapq.heappop(waves.ends)[1])
        if ended and not side.done:
            side.tell(GroupsEnded(tuple(ended)), now)
    return side.result()


class Flow(RolesAlike):
    """Replicas that never wait for one another, in a pool of the serving simulator."""

    def __init__(self, job: RolloutJob, replica: Replica, count: int, router: Router):
        self.job, self.doors = job, range(count)
        clocks = [Clock(replica, job.requests) for _ in range(count)]
        self.pool = ReplicaPool(clocks, job.requests, router)
        self.pool.events.clear()  # groups come when they are asked for
        self.until = 0.0
        for clock in clocks:
            clock.elsewhere = lambda run, took, clock=clock: self._after_loading(clock, run, took)
        self.open = np.full(len(job.requests) // job.samples, job.samples)
        self.ended: list[int] = []
        self.together = not router.looks and not any(front.there for front in self.pool.fronts)
        self.side = TrainingSide(job, self)
        self.side.loaded = 0.0

    def _after_loading(self, clock: Clock, run: Iterate, took: Took) -> Took:
        """The times of an iteration that begins when the parameters are loaded."""
        wait = self.until - clock.now
        if wait <= 0:
            return took
        return took._replace(elsewhere=took.elsewhere + wait, growth=0.0, slope=0.0, room=0)

    def ask(self, first: int, count: int, now: float) -> None:
        """Generate the answers of so many groups from now on."""
        each, pool = self.job.samples, self.pool
        numbers = range(first * each, (first + count) * each)
        if not self.together:
            pool.arrive(numbers, now)
            return
        told: dict[int, list[NewRequest]] = {}
        for number in numbers:
            door = pool.router.choose(pool.said[number], pool.seen) if len(self.doors) > 1 else 0
            told.setdefault(door, []).append(pool.said[number])
        for door, requests in told.items():
            pool.send(door, requests, now)

    def load(self, now: float, until_s: float) -> None:
        """Load new parameters behind the iterations under way, and compute what the caches hold again."""
        self.until = until_s
        for which, clock in enumerate(self.pool.clocks):
            if clock.iterate is None:
                continue
            clock.reloads = True
            if clock.times > 1:
                self.pool.cut(which, now)

    @property
    def interrupted(self) -> int:
        """Answers during which new parameters came, one for each time."""
        return sum(len(clock.void) for clock in self.pool.clocks)

    @property
    def recomputed(self) -> int:
        """Tokens computed again for that."""
        return sum(sum(clock.void) for clock in self.pool.clocks)

    def busy_s(self, now: float) -> float:
        """Return the seconds until now in which replicas were not idle, summed over them."""
        done = sum(sum(clock.spent) - clock.spent[IDLE] for clock in self.pool.clocks)
        return done + sum(now - clock.now for clock in self.pool.clocks if clock.iterate is not None)

    def finished(self, which: int, finished: Sequence[int], now: float) -> None:
        """Note which groups have ended."""
        for number in finished:
            group = number // self.job.samples
            self.open[group] -= 1
            if not self.open[group]:
                self.ended.append(group)

    def move(self, now: float) -> float:
        """Let the training side do what is due, and return when something is next."""
        side = self.side
        if side.ends <= now or side.loaded <= now:
            side.advance(now)
        if self.ended and not side.done:
            ended, self.ended = tuple(self.ended), []
            side.tell(GroupsEnded(ended), now)
        if side.done:
            self.pool.events.clear()
            return inf
        return side.due

    def run(self) -> RolledOut:
        """Simulate until all steps have been trained."""
        heapq.heappush(self.pool.events, (0.0, MOVES, next(self.pool.order), 0, 0))
        self.pool.run(self)
        return self.side.result()
