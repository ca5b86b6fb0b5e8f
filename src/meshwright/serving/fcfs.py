"""First come, first served: the order in which requests wait, and what every order of one's own has."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import msgspec

from meshwright.serving.engine_request import EngineRequest

if TYPE_CHECKING:
    from meshwright.serving.cache import KvCache

#: More iterations than any run of equal ones has.
FOR_EVER = 1 << 40


class WaitingQueue(Protocol):
    """The requests that wait at one engine, in an order.

    ``ranks``: those who run are kept in order of :meth:`rank`, so that the last of them is evicted first; without it
    they are in order of admission. ``reads_cache``: who is first depends on the cache.
    """

    ranks: bool
    reads_cache: bool

    def add(self, one: EngineRequest) -> None:
        """Let a request wait."""

    def first(self, cache: KvCache) -> EngineRequest | None:
        """Return the request that is to run next; None where nobody may."""

    def take(self, one: EngineRequest) -> None:
        """Note that a request runs now; it is the first, or one that the policy picked."""

    def drop(self, one: EngineRequest) -> None:
        """Let a request go that waits, as nobody needs it any more."""

    def back(self, one: EngineRequest) -> None:
        """Let a request wait again that was evicted."""

    def computed(self, one: EngineRequest, tokens: int, generated: int) -> None:
        """Note that so many tokens of a request were computed, and so many generated."""

    def decoded(self, tenants: dict[int, int], times: int) -> None:
        """Note that so many sequences of each tenant computed a token and generated one, so many times; they are told
        of here alone."""

    def left(self, one: EngineRequest) -> None:
        """Note that a request is answered or withdrawn."""

    def unchanged(self, decoding: dict[int, int]) -> int:
        """Return the iterations in which so many sequences of each tenant decode, and nothing else is computed, that
        leave whom it would let run next the same as far as the cache stays as it is."""

    def rank(self, one: EngineRequest) -> object:
        """Return a key by which those who run are sorted, the most important first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[EngineRequest]: ...


class OrderPolicy(Protocol):
    """A policy of who is served first: :meth:`open` begins the queue of one engine. One that makes no difference where
    requests do not say a column (or a bound, ``ttft``) names it in ``goes_by``."""

    name: str
    title: str

    def open(self) -> WaitingQueue:
        """Return an empty queue."""


class SettledQueue:
    """The part of a queue whose order is decided when requests come: nothing that is computed changes it."""

    ranks = False
    reads_cache = False

    def computed(self, one: EngineRequest, tokens: int, generated: int) -> None:
        """Nothing depends on what is computed."""

    def decoded(self, tenants: dict[int, int], times: int) -> None:
        """Nothing depends on who decodes."""

    def left(self, one: EngineRequest) -> None:
        """Nothing depends on who leaves."""

    def unchanged(self, decoding: dict[int, int]) -> int:
        """Return for ever: who comes first is decided when it comes."""
        return FOR_EVER


class InOrder(SettledQueue):
    """A queue in order of arrival; what was evicted stands before all others."""

    def __init__(self) -> None:
        self.waiting: deque[EngineRequest] = deque()

    def add(self, one: EngineRequest) -> None:
        """Let a request wait behind all others."""
        self.waiting.append(one)

    def first(self, cache: KvCache) -> EngineRequest | None:
        """Return the request that waits longest."""
        if cache.adapters is None:
            return self.waiting[0] if self.waiting else None
        return next((one for one in self.waiting if cache.allows(one)), None)

    def take(self, one: EngineRequest) -> None:
        """Note that a request runs now."""
        if self.waiting[0] is one:
            self.waiting.popleft()
        else:
            self.waiting.remove(one)

    drop = take

    def back(self, one: EngineRequest) -> None:
        """Let a request wait before all others."""
        self.waiting.appendleft(one)

    def rank(self, one: EngineRequest) -> int:
        """Return when it came."""
        return one.order

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self.waiting)


class Fcfs(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "fcfs"
    title: str = "first come, first served"

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return InOrder()


POLICY = Fcfs()
