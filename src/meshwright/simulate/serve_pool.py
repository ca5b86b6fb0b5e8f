"""Replicas side by side on one virtual clock, where a router looks at them: an event for every arrival and iteration.

Where requests are dealt out by themselves every replica is simulated alone (:mod:`meshwright.simulate.serve`). A router
that looks sees replicas as they are when a request arrives: what an iteration under way will answer is not answered
yet.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from meshwright.serving.batching import Computed, Queues
from meshwright.serving.routing import ReplicaLoad, Router
from meshwright.simulate.serve import refuse_oversized
from meshwright.simulate.serve_plain import Clock
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.requests import Requests

#: Kinds of events: of the same time, requests come before an iteration ends, so that they are in the next one.
ARRIVES, ENDS = 0, 1


def load_of(state: Queues) -> ReplicaLoad:
    """Return what a router sees of a replica."""
    tokens = sum(one.prompt + one.generated for one in (*state.waiting, *state.running))
    return ReplicaLoad(len(state.waiting), len(state.running), tokens)


class _Pool:
    """The events to come, and where every request went."""

    def __init__(self, replica: Replica, replicas: int, requests: Requests, router: Router):
        self.clocks = [Clock(replica, requests) for _ in range(replicas)]
        self.finished: list[list[int]] = [[] for _ in range(replicas)]
        self.requests, self.router = requests, router
        self.where = np.full(len(requests), -1)
        self.order = count()
        self.following = min(requests.concurrency or len(requests), len(requests))
        known = requests.arrival_s[: self.following].tolist()
        self.events = [(at, ARRIVES, next(self.order), i) for i, at in enumerate(known)]

    def run(self) -> None:
        while self.events:
            now, kind, _, which = heapq.heappop(self.events)
            if kind == ARRIVES:
                self.route(which, now)
            else:
                self.end(which, now)

    def route(self, number: int, now: float) -> None:
        """Send a request to a replica, which starts to compute if it was idle."""
        chosen = self.router.choose(number, [load_of(clock.state) for clock in self.clocks])
        self.where[number], clock = chosen, self.clocks[chosen]
        clock.arrival[number] = now
        idle = not clock.shares
        if idle:
            clock.idle_until(now)
        clock.ask((number,))
        if idle:
            self.start(chosen)

    def end(self, which: int, now: float) -> None:
        """End an iteration: in a closed loop as many requests come as it answered, then the next one is planned."""
        finished, self.finished[which] = self.finished[which], []
        for _ in finished[: len(self.requests) - self.following]:
            self.following += 1
            self.route(self.following - 1, now)
        self.clocks[which].tell(Computed(tuple(finished)))
        self.start(which)

    def start(self, which: int) -> None:
        """Let a replica compute, if it has anything to."""
        clock = self.clocks[which]
        if clock.shares:
            self.finished[which] = clock.compute()
            heapq.heappush(self.events, (clock.now, ENDS, next(self.order), which))


def pooled(
    replica: Replica, replicas: int, requests: Requests, router: Router
) -> tuple[list[Requests], list[ServedRequests]]:
    """Return the requests of every replica that served any, and what became of them.

    Raises:
        MeshwrightError: W012 for requests that the cache can never hold.
    """
    refuse_oversized(replica, requests)
    pool = _Pool(replica, replicas, requests, router)
    pool.run()
    mine = [np.flatnonzero(pool.where == one) for one in range(replicas)]
    shares = [requests.chosen(which) for which in mine if len(which)]
    return shares, [clock.served().chosen(which) for clock, which in zip(pool.clocks, mine) if len(which)]
