"""Replicas side by side on one virtual clock: an event for every arrival and every run of iterations.

Where requests are dealt out by themselves every replica is simulated alone. A router that looks sees replicas as they
are when a request arrives: what an iteration under way will answer is not answered yet.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from math import inf
from typing import Protocol

import msgspec
import numpy as np

from meshwright.serving.batching import Arrived, EngineState, Withdrawn
from meshwright.serving.borrowing import Resized
from meshwright.serving.certaindex import Certaindex
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.pulling import Offered
from meshwright.serving.routing import Router, opened
from meshwright.simulate.front_line import FrontLine
from meshwright.simulate.serve_plain import Clock, said_of
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.requests import Requests
from meshwright.world.decider import LogEntry

#: Kinds of events: of the same time, requests come before an iteration ends, so that they are in the next one, and a
#: cache that was sent is there after it.
ARRIVES, ENTERS, ENDS, MOVES = range(4)


class ReplicaSeen:
    """A replica as a router sees it, behind its front."""

    __slots__ = ("front", "state")

    def __init__(self, state: EngineState, front: FrontLine):
        self.state, self.front = state, front

    @property
    def waiting(self) -> int:
        """Requests that wait, at the front, here, or for their cache to come."""
        unseen = len(self.state.gate.unseen) + self.front.standing
        return unseen + len(self.state.waiting) + len(self.state.coming) + len(self.state.offered)

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self.state.running)

    @property
    def open(self) -> int:
        """Requests that are not answered."""
        return self.waiting + self.running

    @property
    def tokens(self) -> int:
        """Tokens that its requests hold, or wait with."""
        here = (self.state.gate.unseen, self.state.waiting, self.state.running, self.state.coming.values())
        offered = sum(new.prompt + new.generated for new in self.state.offered)
        return sum(one.target for some in here for one in some) + offered

    def cached(self, hashes: tuple[int, ...]) -> int:
        """Return how many blocks of a prefix its cache has."""
        has = getattr(self.state.cache, "has", None)
        return has(hashes) if has is not None else 0


class RolesApart(Protocol):
    """The part of a simulation in which requests go from one replica to another: ``doors`` are those that take new
    ones. Between the methods no time passes."""

    doors: Sequence[int]

    def asked(self, request: NewRequest, which: int) -> NewRequest:
        """Return a new request as it is said to a replica."""

    def started(self, which: int) -> None:
        """Note that a replica began an iteration."""

    def answered(self, which: int, finished: Sequence[int]) -> list[int]:
        """Return those of the requests that a replica finished which go nowhere else."""

    def finished(self, which: int, finished: Sequence[int], now: float) -> None:
        """Let those go on elsewhere that a replica, which knows it, finished."""

    def move(self, now: float) -> float:
        """Let happen what is due, and return when something is next."""


class RolesAlike:
    """The part of a simulation whose requests end where they began, and in which nothing depends on when an iteration
    begins: a base of those that look at replicas for something else."""

    def asked(self, request: NewRequest, which: int) -> NewRequest:
        """Return a new request as it is."""
        return request

    def started(self, which: int) -> None:
        """Nothing depends on when an iteration begins."""

    def answered(self, which: int, finished: Sequence[int]) -> list[int]:
        """Return all: requests end where they began."""
        return list(finished)

    def finished(self, which: int, finished: Sequence[int], now: float) -> None:
        """Nothing goes on elsewhere."""


class ReplicaPool:
    """The events to come of several replicas, and where every request went last."""

    def __init__(self, clocks: Sequence[Clock], requests: Requests, router: Router | None = None):
        self.clocks, self.apart = clocks, None
        hosts = [clock.replica.host for clock in clocks]
        self.fronts = [FrontLine(host.serial_s, host.serial_token_s) for host in hosts]
        self.seen = [ReplicaSeen(clock.state, front) for clock, front in zip(clocks, self.fronts)]
        self.version = [0] * len(clocks)
        chunks = any(clock.replica.rules.chunks for clock in clocks)
        self.requests, self.router = requests, router and opened(router)
        self.said = said_of(requests, chunks=chunks)
        self.where = np.full(len(requests), -1)
        self.came_s: dict[int, float] = {}
        self.leaving: dict[int, list[int]] = {}
        self.certain = Certaindex(requests.program, requests.needed) if len(requests.needed) else None
        self.order = count()
        self.following = min(requests.concurrency or len(requests), len(requests))
        self.next: dict[int, list[int]] = {}
        after = requests.after.tolist() if len(requests.after) else [-1] * len(requests)
        for i, before in enumerate(after):
            if before >= 0:
                self.next.setdefault(before, []).append(i)
        self.events = [
            (at, ARRIVES, next(self.order), i, 0)
            for i, at in enumerate(requests.arrival_s[: self.following].tolist())
            if after[i] < 0
        ]
        heapq.heapify(self.events)

    def run(self, apart: RolesApart | None = None) -> None:
        """Simulate until nothing is left to happen; `apart`: requests may go from one replica to another."""
        self.apart, moves = apart, inf
        while self.events:
            now, kind, _, which, version = heapq.heappop(self.events)
            if kind == ARRIVES:
                together = [which]
                while self.events and self.events[0][:2] == (now, ARRIVES):
                    together.append(heapq.heappop(self.events)[3])
                self.arrive(together, now)
            elif kind == ENTERS:
                self.enter(which, version, now)
            elif kind == ENDS and version == self.version[which]:
                self.end(which, now)
            if apart is not None:
                due = apart.move(now)
                if due != moves and due < inf:
                    heapq.heappush(self.events, (due, MOVES, next(self.order), 0, 0))
                moves = due

    def arrive(self, numbers: Sequence[int], now: float) -> None:
        """Send requests that come at the same time to replicas, which start to compute if they were idle."""
        if self.certain is not None:
            numbers = [number for number in numbers if number not in self.certain.gone]
        doors = range(len(self.clocks)) if self.apart is None else self.apart.doors
        alone = self.router is None or len(doors) == 1
        for some in [numbers] if alone else [[number] for number in numbers]:
            seen = [self.seen[door] for door in doors]
            chosen = doors[0 if alone else self.router.choose(self.said[some[0]], seen)]
            if self.fronts[chosen].there:
                self.stand(some, chosen, now)
            else:
                self.send(chosen, self.asked(some, chosen), now)

    def asked(self, numbers: Sequence[int], chosen: int) -> list[NewRequest]:
        """Return new requests as they are said to a replica."""
        said = [self.said[number] for number in numbers]
        return said if self.apart is None else [self.apart.asked(one, chosen) for one in said]

    def stand(self, numbers: Sequence[int], chosen: int, now: float) -> None:
        """Let requests stand at the front of a replica, one after the other."""
        for number in numbers:
            self.came_s[number] = now
            through = self.fronts[chosen].stand(now, self.said[number].prompt)
            heapq.heappush(self.events, (through, ENTERS, next(self.order), number, chosen))

    def enter(self, number: int, chosen: int, now: float) -> None:
        """Tell a replica of a request that is through its front, unless nobody needs it any more."""
        self.fronts[chosen].standing -= 1
        if self.certain is None or number not in self.certain.gone:
            self.send(chosen, self.asked([number], chosen), now)
            self.clocks[chosen].arrival[number] = self.came_s.pop(number)

    def send(self, chosen: int, requests: Sequence[NewRequest], now: float) -> None:
        """Tell a replica of requests."""
        clock = self.clocks[chosen]
        for one in requests:
            self.where[one.number], clock.arrival[one.number] = chosen, now
        if clock.replica.wanted_s:
            requests = [self._wanted(one, clock.replica.wanted_s, now) for one in requests]
        full = len(clock.state.running) >= clock.replica.limits.max_batch
        self.tell(chosen, Arrived(tuple(requests)), now, cuts=not full)

    def tell(
        self, which: int, event: Arrived | Withdrawn | Offered | Resized, now: float, *, cuts: bool = True
    ) -> None:
        """Tell a replica what happened, which starts to compute if it was idle; a run of iterations under way ends
        behind the one under way if the event `cuts` it."""
        clock = self.clocks[which]
        if clock.iterate is None:
            clock.idle_until(now)
            clock.tell(event)
            self.start(which)
            return
        if cuts and clock.times > 1:
            self._until(which, clock.cut(now))
        if isinstance(event, Offered):
            event = Offered(event.requests, clock.times)
        clock.tell(event)

    def cut(self, which: int, now: float) -> None:
        """End a run of iterations of a replica behind the one under way."""
        self._until(which, self.clocks[which].cut(now))

    def _wanted(self, one: NewRequest, wanted_s: Sequence[float], now: float) -> NewRequest:
        """A request with the time by which its first token is wanted, by its class of objectives; 0 for none."""
        bound = wanted_s[self.requests.slo[one.number] if len(self.requests.slo) else 0]
        return msgspec.structs.replace(one, deadline_s=now + bound) if bound else one

    def end(self, which: int, now: float) -> None:
        """End a run of iterations: those come who waited for what it answered, then the next one is planned."""
        clock = self.clocks[which]
        finished = clock.compute()
        gone: list[int] = []
        if self.certain is not None:
            finished, gone = self._settled(which, finished, now)
        answered = [*finished, *gone] if self.apart is None else self.apart.answered(which, finished)
        follow = list(range(self.following, min(self.following + len(answered), len(self.requests))))
        self.following += len(follow)
        for number in answered:
            for later in self.next.pop(number, ()):
                wait = float(self.requests.arrival_s[later])
                if wait > 0:
                    heapq.heappush(self.events, (clock.out_s + wait, ARRIVES, next(self.order), later, 0))
                else:
                    follow.append(later)
        if follow and clock.out_s > now:
            for number in follow:
                heapq.heappush(self.events, (clock.out_s, ARRIVES, next(self.order), number, 0))
        elif follow:
            clock.times, times = 1, clock.times  # it is over, and nobody cuts it
            self.arrive(follow, now)
            clock.times = times
        clock.computed(finished, self.leaving.pop(which, ()))
        self.start(which)
        if self.apart is not None:
            self.apart.finished(which, finished, now)

    def _settled(self, here: int, finished: Sequence[int], now: float) -> tuple[list[int], list[int]]:
        """Return which requests were answered in time, and which nobody needs any more. These leave at the end of the
        iteration that they take part in, wherever they are."""
        assert self.certain is not None
        finished = [number for number in finished if number not in self.certain.gone]
        gone = self.certain.settles(finished)
        for number in gone:
            self.clocks[max(self.where[number], 0)].withdraw(number, now, came=self.where[number] >= 0)
        for which, clock in enumerate(self.clocks):
            mine = [number for number in gone if self.where[number] == which]
            if not mine:
                continue
            self.leaving.setdefault(which, []).extend(mine)
            if which != here and clock.times > 1:
                self._until(which, clock.cut(now))
        return finished, gone

    def start(self, which: int) -> None:
        """Let a replica compute, if it has anything to."""
        if self.clocks[which].iterate is not None:
            self._until(which, self.clocks[which].begin())
            if self.apart is not None:
                self.apart.started(which)

    def _until(self, which: int, end_s: float) -> None:
        self.version[which] += 1
        heapq.heappush(self.events, (end_s, ENDS, next(self.order), which, self.version[which]))


def served_alone(replica: Replica, requests: Requests, *, skips: bool = True) -> ServedRequests:
    """Return what becomes of requests that one replica serves; without `skips` every iteration by itself."""
    pool = ReplicaPool([Clock(replica, requests, skips=skips)], requests)
    pool.run()
    return pool.clocks[0].served()


def served_logged(replica: Replica, requests: Requests) -> tuple[ServedRequests, list[LogEntry]]:
    """Return the same, with the decider's log, which replays."""
    pool = ReplicaPool([Clock(replica, requests, logs=True)], requests)
    pool.run()
    return pool.clocks[0].served(), pool.clocks[0].log


def pooled(
    replica: Replica, replicas: int, requests: Requests, router: Router
) -> tuple[list[Requests], list[ServedRequests]]:
    """Return the requests of every replica that served any, and what became of them, without those withdrawn."""
    pool = ReplicaPool([Clock(replica, requests) for _ in range(replicas)], requests, router)
    pool.run()
    return shares_of(pool)


def shares_of(pool: ReplicaPool) -> tuple[list[Requests], list[ServedRequests]]:
    """Return the same of replicas that have served."""
    if pool.certain is not None:
        pool.where[list(pool.certain.gone)] = -1
    mine = [np.flatnonzero(pool.where == one) for one in range(len(pool.clocks))]
    shares = [pool.requests.chosen(which) for which in mine if len(which)]
    return shares, [clock.served().chosen(which) for clock, which in zip(pool.clocks, mine) if len(which)]
