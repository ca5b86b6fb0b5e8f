"""Keys and values on their way between replicas: transfers that share the ports of senders and receivers.

A transfer is a latency, then seconds of work for a port that nobody else uses. Transfers that meet at a port share it
max-min fairly (progressive filling: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2), as messages of a
training step do (:mod:`meshwright.simulate.ports`). Of two ends with unequal numbers of ranks the one with fewer is
full before the other, which then has room for other transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

#: A port: the replica, the way (out or in), and the level of the cluster at which the two ends meet.
Port = tuple[int, str, str]


class KvPath(NamedTuple):
    """The way of a request's cache from a replica to another: ``seconds`` of so many tokens as (latency, the rest),
    and of each end the share of its ports that a transfer takes which goes as fast as it can. ``layers`` are sent one
    after the other by each rank."""

    seconds: Callable[[int], tuple[float, float]]
    out_share: float
    in_share: float
    level: str
    layers: int

    def slower(self, factor: float) -> KvPath:
        """Return a way on which everything takes `factor` times as long."""
        return self._replace(seconds=lambda tokens: tuple(part * factor for part in self.seconds(tokens)))


class KvFlow:
    """A transfer: who sends and receives it, when its bytes begin to flow, seconds of work that are ``left``, and when
    it can be over at the earliest (``floor_s``)."""

    __slots__ = ("floor_s", "flowing", "left", "number", "ports", "rate", "ready_s", "shares", "source", "target")

    def __init__(self, number: int, source: int, target: int, path: KvPath, ready_s: float, left: float, floor_s=0.0):
        self.number, self.source, self.target = number, source, target
        self.ready_s, self.left, self.floor_s = ready_s, left, floor_s
        self.ports: tuple[Port, Port] = ((source, "out", path.level), (target, "in", path.level))
        self.shares = (path.out_share, path.in_share)
        self.rate, self.flowing = 0.0, False


class KvLinks:
    """All transfers under way, on the clock of their simulation; ``busy`` are the seconds of work done so far."""

    def __init__(self) -> None:
        self.flows: list[KvFlow] = []
        self.now = self.busy = 0.0

    def add(self, flow: KvFlow) -> None:
        """Begin a transfer; nothing of the past may be left to :meth:`advance` over."""
        self.flows.append(flow)
        self._settle()

    @property
    def next_s(self) -> float:
        """When the next transfer begins to flow or ends, if no other is added."""
        return min(map(self._next_of, self.flows), default=inf)

    def _next_of(self, flow: KvFlow) -> float:
        if not flow.flowing:
            return flow.ready_s
        return self.now + flow.left / flow.rate if flow.left > 0 else max(self.now, flow.floor_s)

    def advance(self, to_s: float) -> list[KvFlow]:
        """Let time pass, to the next change at most; returns the transfers that are over."""
        changed, worked = False, 0.0
        for flow in self.flows:
            if not flow.flowing:
                changed = changed or flow.ready_s <= to_s
            elif flow.left > 0:
                drained = self._next_of(flow) <= to_s
                moved = flow.left if drained else min(flow.left, (to_s - self.now) * flow.rate)
                flow.left -= moved
                worked += moved
                changed = changed or drained
        self.now, self.busy = to_s, self.busy + worked
        if changed:
            self._settle()
        over = [flow for flow in self.flows if flow.flowing and flow.left <= 0 and flow.floor_s <= to_s]
        if over:
            self.flows = [flow for flow in self.flows if flow not in over]
        return over

    def _settle(self) -> None:
        """Give every transfer its rate: all grow alike until a port is full, then those that do not use it."""
        for flow in self.flows:
            flow.flowing = flow.flowing or flow.ready_s <= self.now
            flow.rate = 0.0
        rising = [flow for flow in self.flows if flow.flowing and flow.left > 0]
        room: dict[Port, float] = {port: 1.0 for flow in rising for port in flow.ports}
        while rising:
            load = dict.fromkeys(room, 0.0)
            for flow in rising:
                for port, share in zip(flow.ports, flow.shares):
                    load[port] += share
            step = min(room[port] / used for port, used in load.items() if used > 0)
            for flow in rising:
                flow.rate += step
            for port, used in load.items():
                room[port] -= step * used
            full = {port for port, used in load.items() if used > 0 and room[port] <= 1e-12}
            rising = [flow for flow in rising if not full & {*flow.ports}]
