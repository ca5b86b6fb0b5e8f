"""Virtual token counter: of the tenants that wait the one that was served least so far goes first (Sheng et al., OSDI
2024, 2401.00588, algorithm 2).

A tenant's counter grows by one for each token of a prompt that is admitted and by two for each token generated, as such
tokens are priced (section 5.1). A tenant that comes back after a pause starts from the smallest counter of those that
wait, so that nobody saves up. Between two tenants that always wait the difference of service is bounded by what one
batch holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import FOR_EVER, WaitingQueue

if TYPE_CHECKING:
    from meshwright.serving.cache import KvCache

#: Service of a token of a prompt, and of one that is generated.
PROMPT, GENERATED = 1, 2


class CountedQueue:
    """A queue of a line for each tenant, and the service that each has had (``served``).

    ``charged`` are the requests whose prompts are counted, ``last`` the tenant whose line became empty last, ``new``
    those who began to wait since somebody was last looked for."""

    ranks = False
    reads_cache = False

    def __init__(self) -> None:
        self.lines: dict[int, deque[EngineRequest]] = {}
        self.served: dict[int, int] = {}
        self.charged: set[int] = set()
        self.last: int | None = None
        self.new: list[int] = []

    def add(self, one: EngineRequest) -> None:
        """Let a request wait behind its tenant's others."""
        tenant = one.new.tenant
        if tenant not in self.lines:
            self.new.append(tenant)
            self.served.setdefault(tenant, 0)
        self.lines.setdefault(tenant, deque()).append(one)

    def _begin(self) -> None:
        """Let those who began to wait start from the least served of the others. It is done when somebody is looked
        for, at the end of an iteration, and not in the middle of one, whose service is not counted yet."""
        while self.new:
            others = [self.served[t] for t in self.lines if t not in self.new]
            tenant = self.new.pop(0)
            self.served[tenant] = max(self.served[tenant], min(others, default=self.served.get(self.last, 0)))

    def first(self, cache: KvCache) -> EngineRequest | None:
        """Return the first request of the tenant that was served least."""
        self._begin()
        return min((line[0] for line in self.lines.values()), key=self._key, default=None)

    def _key(self, one: EngineRequest) -> tuple[int, int]:
        return self.served[one.new.tenant], one.order

    def take(self, one: EngineRequest) -> None:
        """Note that a request runs now, and count its prompt the first time."""
        self.drop(one)
        if one.number not in self.charged:
            self.charged.add(one.number)
            self.served[one.new.tenant] += PROMPT * (one.prompt - one.new.computed if one.new.computed else one.prompt)

    def drop(self, one: EngineRequest) -> None:
        """Let a request go that waits; what was not computed is not counted."""
        line = self.lines[one.new.tenant]
        line.remove(one)
        if not line:
            del self.lines[one.new.tenant]
            self.last = one.new.tenant

    def back(self, one: EngineRequest) -> None:
        """Let a request wait before its tenant's others."""
        self.lines.setdefault(one.new.tenant, deque()).appendleft(one)

    def computed(self, one: EngineRequest, tokens: int, generated: int) -> None:
        """Count what was generated."""
        self.served[one.new.tenant] += GENERATED * generated

    def decoded(self, tenants: dict[int, int], times: int) -> None:
        """Count what was generated."""
        for tenant, sequences in tenants.items():
            self.served[tenant] += GENERATED * sequences * times

    def left(self, one: EngineRequest) -> None:
        """Forget a request."""
        self.charged.discard(one.number)

    def unchanged(self, decoding: dict[int, int]) -> int:
        """Return the iterations until another tenant is the least served one."""
        one = self.first(None)
        if one is None:
            return FOR_EVER
        served, pace = self.served[one.new.tenant], decoding.get(one.new.tenant, 0)
        found = FOR_EVER
        for tenant in self.lines:
            closer = GENERATED * (pace - decoding.get(tenant, 0))
            if closer > 0:
                found = min(found, -(-(self.served[tenant] - served) // closer))
        return max(found, 1)

    def rank(self, one: EngineRequest) -> int:
        """Return when it came."""
        return one.order

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(sorted((one for line in self.lines.values() for one in line), key=self._key))


class Vtc(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "vtc"
    title: str = "the tenant served least first (virtual token counter)"
    goes_by: str = "tenant"

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return CountedQueue()


POLICY = Vtc()
