"""A share of the multiprocessors for a job beside serving that follows the online load: ``sharing=muxflow:1.2``.

MuxFlow (Zhao et al. 2023, arXiv 2303.13803): the offline job has the complement of what the online one needs at its
peak, and a monitor on every device keeps the online one safe: it takes the job off a device that is over its limit, and
lets it come back when the device was healthy for a while, longer after every time. Here the peak is that of the last
``windows`` observations, shares are whole ``step`` of the device, and over the limit is where iterations take more
than ``number`` times as long as alone: the job's share is halved then, and grows again by steps. The limit, the steps
and what the monitor waits for are choices of this file.
"""

from __future__ import annotations

from math import floor

import msgspec

from meshwright.serving.sharing import JobShare, Observed


class Monitor(msgspec.Struct, frozen=True):
    """The state of one device: what was ``needed`` of late, the ``job``'s share, for how many more observations it is
    off the device (``off``), and for how many it was the last time (``last``); ``evicted`` counts how often. ``most``
    is the most that the job gets, ``healthy`` the observations since that was changed."""

    needed: tuple[float, ...] = ()
    job: float = 0.0
    off: int = 0
    last: int = 0
    evicted: int = 0
    most: float = 1.0
    healthy: int = 0


class MuxFlow(msgspec.Struct, frozen=True):
    """The policy; ``number`` is how many times as long as alone an iteration may take."""

    name: str = "muxflow"
    title: str = "the complement of what requests need at their peak, and none over the limit"
    number: float = 1.2
    windows: int = 5
    step: float = 0.05
    wait: int = 5
    longest: int = 80

    def wrong(self) -> str:
        """Return what is wrong with its number, or ""."""
        return "" if self.number > 1 else f"iterations may take more than 1 times as long as alone, not {self.number:g}"

    def begin(self) -> Monitor:
        """Nothing is known of the load: the job waits."""
        return Monitor()

    def decide(self, state: Monitor, event: Observed) -> tuple[Monitor, tuple[JobShare, ...]]:
        """The state after an observation, and the job's share where that is another one."""
        after = self._after(state, event)
        return after, (JobShare(after.job),) if after.job != state.job else ()

    def share(self, state: Monitor) -> float:
        """Return the job's share in a state."""
        return state.job

    def _after(self, state: Monitor, event: Observed) -> Monitor:
        needed = (*state.needed, event.needed)[-self.windows :]
        seen = msgspec.structs.replace(state, needed=needed)
        if state.off:
            return msgspec.structs.replace(seen, off=state.off - 1, job=0.0)
        if state.job and event.slowdown > self.number:  # half of what it had is too much no longer, or it leaves
            most = self._whole(state.job / 2)
            off = 0 if most else min(self.longest, max(self.wait, 2 * state.last))
            left = {"off": off, "last": off, "evicted": state.evicted + 1} if off else {}
            return msgspec.structs.replace(seen, job=most, most=max(most, self.step), healthy=0, **left)
        if len(needed) < self.windows:
            return seen
        healthy, most = state.healthy + 1, state.most
        if healthy >= self.wait and most < 1.0:
            healthy, most = 0, min(1.0, most + self.step)
        job = self._whole(min(most, 1.0 - max(needed), 1.0 - self.step))
        return msgspec.structs.replace(seen, job=job, most=most, healthy=healthy)

    def _whole(self, share: float) -> float:
        """A share in whole steps, rounded down."""
        return round(max(0.0, floor(share / self.step + 1e-9) * self.step), 9)


POLICY = MuxFlow()
