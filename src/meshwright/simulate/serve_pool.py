"""Replicas side by side on one virtual clock: an event for every arrival and every run of iterations.

Where requests are dealt out by themselves every replica is simulated alone. A router that looks sees replicas as they
are when a request arrives: what an iteration under way will answer is not answered yet.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import msgspec
import numpy as np

from meshwright.serving.batching import Arrived, EngineState
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.routing import Router, opened
from meshwright.simulate.serve_plain import Clock, said_of
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.requests import Requests
from meshwright.world.decider import LogEntry

#: Kinds of events: of the same time, requests come before an iteration ends, so that they are in the next one.
ARRIVES, ENDS = 0, 1


class ReplicaSeen:
    """A replica as a router sees it."""

    __slots__ = ("state",)

    def __init__(self, state: EngineState):
        self.state = state

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self.state.waiting)

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
        return sum(one.target for one in self.state.waiting) + sum(one.target for one in self.state.running)

    def cached(self, hashes: tuple[int, ...]) -> int:
        """Return how many blocks of a prefix its cache has."""
        has = getattr(self.state.cache, "has", None)
        return has(hashes) if has is not None else 0


class ReplicaPool:
    """The events to come of several replicas, and where every request went."""

    def __init__(
        self,
        replica: Replica,
        replicas: int,
        requests: Requests,
        router: Router | None = None,
        *,
        skips: bool = True,
        logs: bool = False,
    ):
        self.clocks = [Clock(replica, requests, skips=skips, logs=logs) for _ in range(replicas)]
        self.seen = [ReplicaSeen(clock.state) for clock in self.clocks]
        self.version = [0] * replicas
        self.requests, self.router, self.said = (
            requests,
            router and opened(router),
            said_of(requests, chunks=bool(replica.rules.chunks)),
        )
        self.where = np.full(len(requests), -1)
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

    def run(self) -> None:
        """Simulate until nothing is left to happen."""
        while self.events:
            now, kind, _, which, version = heapq.heappop(self.events)
            if kind == ARRIVES:
                together = [which]
                while self.events and self.events[0][:2] == (now, ARRIVES):
                    together.append(heapq.heappop(self.events)[3])
                self.arrive(together, now)
            elif version == self.version[which]:
                self.end(which, now)

    def arrive(self, numbers: Sequence[int], now: float) -> None:
        """Send requests that come at the same time to replicas, which start to compute if they were idle."""
        alone = self.router is None or len(self.clocks) == 1
        for some in [numbers] if alone else [[number] for number in numbers]:
            chosen = 0 if alone else self.router.choose(self.said[some[0]], self.seen)
            self.send(chosen, [self.said[number] for number in some], now)

    def send(self, chosen: int, requests: Sequence[NewRequest], now: float) -> None:
        """Tell a replica of requests."""
        clock = self.clocks[chosen]
        for one in requests:
            self.where[one.number], clock.arrival[one.number] = chosen, now
        if clock.replica.wanted_s:
            requests = [self._wanted(one, clock.replica.wanted_s, now) for one in requests]
        idle = clock.iterate is None
        if idle:
            clock.idle_until(now)
        clock.tell(Arrived(tuple(requests)))
        if idle:
            self.start(chosen)
        elif clock.times > 1 and len(clock.state.running) < clock.replica.limits.max_batch:
            self._until(chosen, clock.cut(now))

    def _wanted(self, one: NewRequest, wanted_s: Sequence[float], now: float) -> NewRequest:
        """A request with the time by which its first token is wanted, by its class of objectives; 0 for none."""
        bound = wanted_s[self.requests.slo[one.number] if len(self.requests.slo) else 0]
        return msgspec.structs.replace(one, deadline_s=now + bound) if bound else one

    def end(self, which: int, now: float) -> None:
        """End a run of iterations: those come who waited for what it answered, then the next one is planned."""
        clock = self.clocks[which]
        finished = clock.compute()
        follow = list(range(self.following, min(self.following + len(finished), len(self.requests))))
        self.following += len(follow)
        for number in finished:
            for later in self.next.pop(number, ()):
                wait = float(self.requests.arrival_s[later])
                if wait > 0:
                    heapq.heappush(self.events, (now + wait, ARRIVES, next(self.order), later, 0))
                else:
                    follow.append(later)
        if follow:
            clock.times, times = 1, clock.times  # it is over, and nobody cuts it
            self.arrive(follow, now)
            clock.times = times
        clock.computed(finished)
        self.start(which)

    def start(self, which: int) -> None:
        """Let a replica compute, if it has anything to."""
        if self.clocks[which].iterate is not None:
            self._until(which, self.clocks[which].begin())

    def _until(self, which: int, end_s: float) -> None:
        self.version[which] += 1
        heapq.heappush(self.events, (end_s, ENDS, next(self.order), which, self.version[which]))


def served_alone(replica: Replica, requests: Requests, *, skips: bool = True) -> ServedRequests:
    """Return what becomes of requests that one replica serves; without `skips` every iteration by itself."""
    pool = ReplicaPool(replica, 1, requests, skips=skips)
    pool.run()
    return pool.clocks[0].served()


def served_logged(replica: Replica, requests: Requests) -> tuple[ServedRequests, list[LogEntry]]:
    """Return the same, with the decider's log, which replays."""
    pool = ReplicaPool(replica, 1, requests, logs=True)
    pool.run()
    return pool.clocks[0].served(), pool.clocks[0].log


def pooled(
    replica: Replica, replicas: int, requests: Requests, router: Router
) -> tuple[list[Requests], list[ServedRequests]]:
    """Return the requests of every replica that served any, and what became of them."""
    pool = ReplicaPool(replica, replicas, requests, router)
    pool.run()
    mine = [np.flatnonzero(pool.where == one) for one in range(replicas)]
    shares = [requests.chosen(which) for which in mine if len(which)]
    return shares, [clock.served().chosen(which) for clock, which in zip(pool.clocks, mine) if len(which)]
