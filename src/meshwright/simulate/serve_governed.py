"""Replicas whose devices change while they serve: a part of them is a job's, or their clocks are capped.

A governor looks at all replicas at regular times on their one clock, and decides which part of its devices each has
from then on (:mod:`meshwright.cost.part`). What is under way ends as it began: a run of iterations is cut behind the
one that is computed at that time, the next ones take what they take on the new part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from meshwright.cost.part import OPERATIONS, STARTS, TRAFFIC, DevicePart
from meshwright.serving.batching import Iterate
from meshwright.serving.routing import Router
from meshwright.simulate.iteration_time import Took, iteration_seconds
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.partial import PartialCosts
from meshwright.simulate.serve_plain import Clock
from meshwright.simulate.serve_pool import MOVES, ReplicaPool, RolesAlike, shares_of
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.requests import Requests


class Used(NamedTuple):
    """The use of a replica's devices, in seconds: of iterations (``running``), in which devices compute (``busy``),
    that the same iterations take alone on whole devices (``alone``), and that their operations and their memory's
    traffic take by themselves."""

    running: float = 0.0
    busy: float = 0.0
    alone: float = 0.0
    operations: float = 0.0
    traffic: float = 0.0

    def times(self, factor: float) -> Used:
        """Return so many times this use."""
        return Used(*(factor * value for value in self))

    def plus(self, other: Used) -> Used:
        """Return this use and another one."""
        return Used(*(a + b for a, b in zip(self, other)))


class Governor(Protocol):
    """The one who decides over parts of devices. ``every_s`` is how often it looks; as operations it counts
    ``arithmetic`` alone, or all that keeps multiprocessors busy, which read from the L2 too."""

    every_s: float
    arithmetic: bool

    def part(self, which: int) -> DevicePart:
        """Return the part of its devices that a replica has now."""

    def looked(self, start_s: float, end_s: float, used: Sequence[Used]) -> Sequence[int]:
        """Take note of what replicas did in this time; returns those whose part is another one from now on."""

    def ended(self, start_s: float, end_s: float, used: Sequence[Used]) -> None:
        """Take note of the rest, when all requests are answered."""


class Meter:
    """The use of one replica's devices over time: its sum until now (``used``), and from now on by the second."""

    def __init__(self) -> None:
        self.now, self.used, self.rate, self.next = 0.0, Used(), Used(), Used()

    def until(self, now: float) -> None:
        """Let time pass."""
        self.used, self.now = self.used.plus(self.rate.times(now - self.now)), now

    def taken(self) -> Used:
        """Return what was used since the last time."""
        found, self.used = self.used, Used()
        return found


class GovernedPool(RolesAlike):
    """A simulation of replicas under a governor. ``parts`` prices iterations on parts of devices."""

    def __init__(
        self,
        replica: Replica,
        replicas: int,
        requests: Requests,
        router: Router,
        parts: PartialCosts,
        governor: Governor,
        *,
        skips: bool = True,
    ):
        self.replica, self.parts, self.governor = replica, parts, governor
        self.clocks = [Clock(replica, requests, skips=skips) for _ in range(replicas)]
        self.pool = ReplicaPool(self.clocks, requests, router)
        self.doors = range(replicas)
        self.meters = [Meter() for _ in self.clocks]
        self.looked_s, self.next_s = 0.0, governor.every_s
        self._on: dict[DevicePart, Replica] = {}
        self.starts, busy, self.traffic = (
            self._costing(parts.roofline(part)) for part in (STARTS, OPERATIONS, TRAFFIC)
        )
        self.operations = self._costing(parts.arithmetic()) if governor.arithmetic else busy
        for which, clock in enumerate(self.clocks):
            clock.elsewhere = lambda run, took, which=which: self._took(which, run, took)

    def served(self) -> tuple[list[Requests], list[ServedRequests]]:
        """Simulate; return the requests of every replica that served any, and what became of them."""
        self.pool.run(self)
        end = max(meter.now for meter in self.meters)
        for meter in self.meters:
            meter.until(end)
        self.governor.ended(self.looked_s, end, [meter.taken() for meter in self.meters])
        shares, served = shares_of(self.pool)
        return shares, [one.seen(share, self.replica.host) for one, share in zip(served, shares, strict=True)]

    def started(self, which: int) -> None:
        """Note that a replica began an iteration."""
        meter = self.meters[which]
        meter.until(self.clocks[which].now)
        meter.rate = meter.next

    def answered(self, which: int, finished: Sequence[int]) -> list[int]:
        """Note that iterations are over; all requests end where they began."""
        meter = self.meters[which]
        meter.until(self.clocks[which].now)
        meter.rate = Used()
        return list(finished)

    def move(self, now: float) -> float:
        """Let the governor look when it is time, and return when it looks next: while anything is to come."""
        while now >= self.next_s:
            at = self.next_s
            for meter in self.meters:
                meter.until(max(at, meter.now))
            changed = self.governor.looked(self.looked_s, at, [meter.taken() for meter in self.meters])
            self.looked_s, self.next_s = at, at + self.governor.every_s
            for which in changed:
                if self.clocks[which].iterate is not None and self.clocks[which].times > 1:
                    self.pool.cut(which, now)
        more = any(kind != MOVES for _, kind, *_ in self.pool.events)
        return self.next_s if more else inf

    def _took(self, which: int, run: Iterate, took: Took) -> Took:
        """Return the times of an iteration on the part of the devices that its replica has."""
        part = self.governor.part(which)
        here = took if part == DevicePart() else iteration_seconds(self._replica(part), run)
        starts, operations, traffic = (
            _kernels(iteration_seconds(one, run)) for one in (self.starts, self.operations, self.traffic)
        )
        operations = max(0.0, operations - (0.0 if self.governor.arithmetic else starts))
        traffic = max(0.0, traffic - starts)
        seconds, alone = here.seconds, took.seconds
        parts = (_kernels(here), alone, min(operations, seconds), min(traffic, seconds))
        self.meters[which].next = Used(1.0, *(part / seconds for part in parts))
        if here is took:
            return took
        return took._replace(slower=seconds - alone, growth=here.growth, room=min(took.room, here.room))

    def _replica(self, part: DevicePart) -> Replica:
        found = self._on.get(part)
        if found is None:
            found = self._on[part] = self._costing(self.parts.on(self.replica.costs, part))
        return found

    def _costing(self, costs: IterationCosts) -> Replica:
        """The replica whose iterations take so long."""
        return msgspec.structs.replace(self.replica, costs=costs)


def _kernels(took: Took) -> float:
    """The seconds of an iteration in which its devices compute."""
    return took.linear + took.sampled + took.decode + took.prefill
