"""Shortest job first: of those who wait the one with the shortest answer runs first, of equals the one that came first.

The mean time of requests is then the smallest that any order of whole jobs gives (Smith 1956). The length is the most
that a request may generate, in place of a predictor of it (by which Fu et al. 2024, 2408.15792, rank requests); those
who run are in the same order, so that the longest is evicted first.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import WaitingQueue
from meshwright.serving.priority import RankedQueue


class ShortestQueue(RankedQueue):
    """A queue in order of the lengths of answers."""

    def rank(self, one: EngineRequest) -> object:
        """Return how much it may generate, the least first."""
        return one.limit, one.order


class ShortestJob(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "sjf"
    title: str = "the shortest answer first"

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return ShortestQueue()


POLICY = ShortestJob()
