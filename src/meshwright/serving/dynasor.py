"""Dynasor's order: the requests of one query run together, and the query that is through soonest goes first (Fu et al.
2024, 2412.20993).

Requests of a query that runs already go before those of others (gang scheduling), so that no query waits for its last
request; of queries that did not begin the one with the least work left goes first (shortest job first, by the most that
its requests may generate). A request by itself is a query of one. ``certain=`` ends queries early
(:mod:`meshwright.serving.certaindex`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import SettledQueue, WaitingQueue

if TYPE_CHECKING:
    from meshwright.serving.cache import KvCache


class GangQueue(SettledQueue):
    """A queue of a line for each query; ``begun`` are the queries of which a request was taken, ``work`` the tokens
    that those of a line may generate."""

    ranks = False
    reads_cache = False

    def __init__(self) -> None:
        self.lines: dict[int, deque[EngineRequest]] = {}
        self.begun: set[int] = set()
        self.work: dict[int, int] = {}

    def add(self, one: EngineRequest) -> None:
        """Let a request wait behind the others of its query."""
        query = query_of(one)
        self.lines.setdefault(query, deque()).append(one)
        self.work[query] = self.work.get(query, 0) + one.limit

    def back(self, one: EngineRequest) -> None:
        """Let a request wait before the others of its query, which goes on being begun."""
        query = query_of(one)
        self.lines.setdefault(query, deque()).appendleft(one)
        self.work[query] = self.work.get(query, 0) + one.limit

    def first(self, cache: KvCache) -> EngineRequest | None:
        """Return the first request of a query that runs, else of the one with the least work."""
        return min((line[0] for line in self.lines.values()), key=self._key, default=None)

    def _key(self, one: EngineRequest) -> tuple[bool, int, int]:
        query = query_of(one)
        return query not in self.begun, self.work[query], one.order

    def take(self, one: EngineRequest) -> None:
        """Note that a request runs now, and its query with it."""
        self.drop(one)
        self.begun.add(query_of(one))

    def drop(self, one: EngineRequest) -> None:
        """Let a request go that waits."""
        query = query_of(one)
        self.lines[query].remove(one)
        self.work[query] -= one.limit
        if not self.lines[query]:
            del self.lines[query], self.work[query]

    def left(self, one: EngineRequest) -> None:
        """Forget a query of which no other request waits."""
        query = query_of(one)
        if query not in self.lines:
            self.begun.discard(query)

    def rank(self, one: EngineRequest) -> int:
        """Return when it came."""
        return one.order

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(sorted((one for line in self.lines.values() for one in line), key=self._key))


def query_of(one: EngineRequest) -> int:
    """Return the query of a request: its program's number, or one of its own below 0."""
    return one.new.program if one.new.program >= 0 else -1 - one.order


class Dynasor(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "dynasor"
    title: str = "the requests of a query together, the query with the least work first (Dynasor)"
    goes_by: str = "program"

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return GangQueue()


POLICY = Dynasor()
