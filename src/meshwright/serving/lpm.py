"""Longest prefix match: of those who wait the one runs first of whose prompt the cache has most (SGLang; Zheng et al.,
NeurIPS 2024, 2312.07104, section 3).

The order is found once for each iteration. Where more than 128 requests wait it is that of arrival, as in SGLang, which
saves the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import FOR_EVER, WaitingQueue

if TYPE_CHECKING:
    from meshwright.serving.cache import KvCache

#: Requests that wait beyond which they are served in order of arrival.
MOST_SEARCHED = 128


class MatchedQueue:
    """A queue in order of what the cache has of each request (``waiting``); ``stale`` where that may have changed."""

    ranks = False
    reads_cache = True

    def __init__(self) -> None:
        self.waiting: list[EngineRequest] = []
        self.stale = False

    def add(self, one: EngineRequest) -> None:
        """Let a request wait."""
        self.waiting.append(one)
        self.stale = True

    back = add

    def first(self, cache: KvCache) -> EngineRequest | None:
        """Return the request of which the cache has most."""
        if len(self.waiting) <= MOST_SEARCHED:
            self.sorted(cache)
        elif self.stale:
            self.waiting.sort(key=lambda one: one.order)
            self.stale = False
        return self.waiting[0] if self.waiting else None

    def sorted(self, cache: KvCache) -> list[EngineRequest]:
        """Return those who wait in order of what the cache has of them, of equals in order of arrival."""
        if self.stale:
            self.waiting.sort(key=lambda one: (-cache.has(one.new.hashes), one.order))
            self.stale = False
        return self.waiting

    def take(self, one: EngineRequest) -> None:
        """Note that a request runs now."""
        self.waiting.remove(one)

    drop = take

    def computed(self, one: EngineRequest, tokens: int, generated: int) -> None:
        """Note that the cache may have more."""
        self.stale = True

    def decoded(self, tenants: dict[int, int], times: int) -> None:
        """Note that the cache may have more or less."""
        self.stale = True

    def left(self, one: EngineRequest) -> None:
        """Nothing depends on who leaves: what it leaves in the cache was there before."""

    def unchanged(self, decoding: dict[int, int]) -> int:
        """Return for ever: nothing but the cache matters."""
        return FOR_EVER

    def rank(self, one: EngineRequest) -> int:
        """Return when it came."""
        return one.order

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self.waiting)


class LongestPrefix(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "lpm"
    title: str = "the longest prefix in the cache first (SGLang)"
    goes_by: str = "hashes"

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return MatchedQueue()


POLICY = LongestPrefix()
