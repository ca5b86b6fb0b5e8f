"""Priority: of those who wait the one with the highest priority runs first, of equals the one that came first.

Those who run are in the same order, so that where the cache is full the least important one is evicted (vLLM's
``--scheduling-policy priority``, where a lower number is served earlier; here a higher one is).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import SettledQueue, WaitingQueue

if TYPE_CHECKING:
    from meshwright.serving.cache import KvCache


class RankedQueue(SettledQueue):
    """A queue in order of a rank that a request keeps."""

    ranks = True
    reads_cache = False

    def __init__(self) -> None:
        self.heap: list[tuple[object, int, EngineRequest]] = []

    def add(self, one: EngineRequest) -> None:
        """Let a request wait in its place."""
        heapq.heappush(self.heap, (self.rank(one), one.order, one))

    def first(self, cache: KvCache) -> EngineRequest | None:
        """Return the request of the first rank."""
        return self.heap[0][2] if self.heap else None

    def take(self, one: EngineRequest) -> None:
        """Note that a request runs now."""
        if self.heap[0][2] is one:
            heapq.heappop(self.heap)
        else:
            self.heap = [entry for entry in self.heap if entry[2] is not one]
            heapq.heapify(self.heap)

    back, drop = add, take

    def rank(self, one: EngineRequest) -> object:
        """Return its priority, the highest first."""
        return -one.new.priority, one.order

    def __len__(self) -> int:
        return len(self.heap)

    def __iter__(self) -> Iterator[EngineRequest]:
        return (entry[2] for entry in sorted(self.heap, key=lambda entry: entry[:2]))


class Priority(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "priority"
    title: str = "the highest priority first, which is evicted last"
    goes_by: str = "priority"

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return RankedQueue()


POLICY = Priority()
