"""Autoscaling: the decider of how many replicas of an engine there are, by the rate at which requests come.

It follows the rate that was seen with some room to spare: up at once, and down when fewer would have done for a while,
so that a short lull stops nobody (the stabilisation window of Kubernetes' horizontal pod autoscaler). A replica that is
lost is replaced. It knows no queues and no latencies: that its replicas keep their objectives at the rate it gives each
is for its driver to find out.
"""

from __future__ import annotations

from math import ceil

import msgspec


class RateSeen(msgspec.Struct, frozen=True, tag=True):
    """So many requests a second came since the last look, at ``at_s`` of the day."""

    at_s: float
    rate: float


class ReplicaLost(msgspec.Struct, frozen=True, tag=True):
    """A replica is gone."""

    at_s: float


class StartReplicas(msgspec.Struct, frozen=True, tag=True):
    """Start so many replicas."""

    count: int


class StopReplicas(msgspec.Struct, frozen=True, tag=True):
    """Stop so many replicas, once they have answered what they have."""

    count: int


class ScalingState(msgspec.Struct, frozen=True):
    """The replicas there are or that start, and what was needed lately: (when, replicas)."""

    replicas: int
    needed: tuple[tuple[float, int], ...] = ()


class Autoscaler(msgspec.Struct, frozen=True, kw_only=True):
    """The decider: a replica answers ``rate`` requests a second in time; between ``least`` and ``most`` of them, with
    the share ``room`` to spare; stopped after ``hold_s`` without need. ``begins`` with so many."""

    rate: float
    room: float = 0.2
    least: int = 1
    most: int = 10**6
    hold_s: float = 600.0
    begins: int = 1

    def begin(self) -> ScalingState:
        """The state before anything happened."""
        return ScalingState(min(self.most, max(self.least, self.begins)))

    def decide(
        self, state: ScalingState, event: RateSeen | ReplicaLost
    ) -> tuple[ScalingState, tuple[StartReplicas | StopReplicas, ...]]:
        """Return the state after an event, and what is to be started or stopped."""
        match event:
            case ReplicaLost():
                wanted = min(self.most, max(self.least, state.replicas))
                return msgspec.structs.replace(state, replicas=wanted), (StartReplicas(1),)
            case RateSeen(at_s=now, rate=rate):
                need = min(self.most, max(self.least, self.needed(rate)))
                kept = tuple(one for one in state.needed if one[0] > now - self.hold_s)
                wanted = max(need, *(count for _, count in kept)) if kept else need
                found = ScalingState(max(need, min(state.replicas, wanted)), (*kept, (now, need)))
                change = found.replicas - state.replicas
                if not change:
                    return found, ()
                return found, (StartReplicas(change) if change > 0 else StopReplicas(-change),)

    def needed(self, rate: float) -> int:
        """Return the replicas that a rate needs, with room to spare."""
        return ceil(rate / (self.rate * (1 - self.room)) - 1e-9)
