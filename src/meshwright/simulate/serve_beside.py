"""Jobs beside serving on the same devices: a governor that drives the sharing policy of every replica, and keeps count
of what the jobs get done.

Kernels of requests and of the job have multiprocessors of their own and one memory. One that waits for memory wants all
of its rate, and has 1 / (1 + d) of it beside somebody who wants the share d: each gets as much as it asks for of what
all ask for together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshwright.cost.part import DevicePart
from meshwright.serving.fixed_share import FixedShare
from meshwright.serving.muxflow import MuxFlow
from meshwright.serving.sharing import Observed
from meshwright.simulate.serve_governed import Used
from meshwright.world.decider import LogEntry

#: Seconds between two looks at a device.
LOOK_S = 1.0


class JobSpeed(Protocol):
    """The speed of a job on a share of a device's multiprocessors."""

    def traffic(self, share: float) -> float:
        """Return the share of the memory's rate that it takes there while nobody else does."""

    def speed(self, share: float, other: float) -> float:
        """Return its speed over that on a whole device, there and beside others with `other` of the memory's rate."""


class SharedByJobs:
    """A governor of replicas each of which has a job beside it, or None. ``done_s`` are the seconds of a whole device
    that each job's steps so far are worth, ``shares_s`` its share times seconds, ``there_s`` the seconds in which it
    had any, ``lit_s`` those in which any kernel ran, ``used`` what the replica's devices did in all ``seconds``."""

    every_s = LOOK_S
    arithmetic = False

    def __init__(self, policy: MuxFlow | FixedShare, jobs: Sequence[JobSpeed | None]):
        self.policy, self.jobs = policy, jobs
        self.states = [policy.begin() for _ in jobs]
        self.done_s, self.shares_s, self.there_s, self.lit_s = (np.zeros(len(jobs)) for _ in range(4))
        self.used = [Used() for _ in jobs]
        self.seconds = 0.0
        self.log: list[LogEntry] = []

    def share(self, which: int) -> float:
        """Return the share of the multiprocessors that the job beside a replica has."""
        return self.policy.share(self.states[which]) if self.jobs[which] is not None else 0.0

    def part(self, which: int) -> DevicePart:
        """Return what the requests of a replica have of its devices."""
        share, job = self.share(which), self.jobs[which]
        return DevicePart() if not share or job is None else DevicePart(1.0 - share, 1.0 / (1.0 + job.traffic(share)))

    def looked(self, start_s: float, end_s: float, used: Sequence[Used]) -> list[int]:
        """Take note of what happened, and let the policy decide; returns the replicas whose part is another one."""
        self.ended(start_s, end_s, used)
        changed = []
        for which, (job, one) in enumerate(zip(self.jobs, used)):
            if job is None:
                continue
            before, seconds = self.share(which), end_s - start_s
            slowdown = one.running / one.alone if one.alone else 1.0
            event = Observed(min(1.0, one.operations / seconds), slowdown)
            self.states[which], decisions = self.policy.decide(self.states[which], event)
            self.log.append(LogEntry(event, decisions, end_s))
            if self.share(which) != before:
                changed.append(which)
        return changed

    def ended(self, start_s: float, end_s: float, used: Sequence[Used]) -> None:
        """Take note of what replicas and jobs did in this time."""
        seconds = end_s - start_s
        self.seconds += seconds
        for which, (job, one) in enumerate(zip(self.jobs, used)):
            self.used[which] = self.used[which].plus(one)
            share = self.share(which)
            self.lit_s[which] += seconds if share else min(one.busy, seconds)
            if not share or job is None:
                continue
            alone, beside = job.speed(share, 0.0), job.speed(share, 1.0)
            beside_s = min(one.traffic, seconds)
            self.done_s[which] += alone * (seconds - beside_s) + beside * beside_s
            self.shares_s[which] += share * seconds
            self.there_s[which] += seconds
