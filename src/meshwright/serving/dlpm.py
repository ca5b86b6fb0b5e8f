"""Deficit longest prefix match: the longest cached prefix first, of the tenants that have credit left (Cao et al. 2025,
2501.14312, algorithm 1).

A tenant's credit falls by one for each token of a prompt that is not in the cache and by two for each token generated.
Where no tenant that waits has any, each of them gets a quantum more, until one has: a small quantum is as fair as a
virtual token counter, a large one as good to the cache as longest prefix match.
"""

from __future__ import annotations

import msgspec

from meshwright.serving.cache import KvCache
from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import FOR_EVER, WaitingQueue
from meshwright.serving.lpm import MatchedQueue
from meshwright.serving.vtc import GENERATED, PROMPT


class CreditQueue:
    """A queue in order of what the cache has of each request, of tenants with ``credit``.

    ``charged`` are the requests whose prompts are counted."""

    ranks = False
    reads_cache = True

    def __init__(self, quantum: int):
        self.quantum, self.matched = quantum, MatchedQueue()
        self.credit: dict[int, int] = {}
        self.charged: set[int] = set()

    def add(self, one: EngineRequest) -> None:
        """Let a request wait; a tenant begins with a quantum."""
        self.credit.setdefault(one.new.tenant, self.quantum)
        self.matched.add(one)

    def back(self, one: EngineRequest) -> None:
        """Let a request wait again."""
        self.matched.back(one)

    def first(self, cache: KvCache) -> EngineRequest | None:
        """Return the request of which the cache has most, of a tenant with credit; where none has any, all that wait
        get as many quanta as it takes."""
        if not len(self.matched):
            return None
        order = self.matched.sorted(cache)
        most = max(self.credit[one.new.tenant] for one in order)
        if most <= 0:
            for tenant in {one.new.tenant for one in order}:
                self.credit[tenant] += self.quantum * (-most // self.quantum + 1)
        return next(one for one in order if self.credit[one.new.tenant] > 0)

    def take(self, one: EngineRequest) -> None:
        """Note that a request runs now, and charge what has to be computed of its prompt the first time."""
        self.matched.take(one)
        if one.number not in self.charged:
            self.charged.add(one.number)
            self.credit[one.new.tenant] -= PROMPT * max(one.prompt - one.computed, 0)

    def drop(self, one: EngineRequest) -> None:
        """Let a request go that waits; what was not computed is not charged."""
        self.matched.take(one)

    def computed(self, one: EngineRequest, tokens: int, generated: int) -> None:
        """Charge what was generated."""
        self.credit[one.new.tenant] -= GENERATED * generated
        self.matched.computed(one, tokens, generated)

    def decoded(self, tenants: dict[int, int], times: int) -> None:
        """Charge what was generated."""
        for tenant, sequences in tenants.items():
            if sequences:
                self.credit[tenant] -= GENERATED * sequences * times
        self.matched.decoded(tenants, times)

    def left(self, one: EngineRequest) -> None:
        """Forget a request."""
        self.charged.discard(one.number)

    def unchanged(self, decoding: dict[int, int]) -> int:
        """Return the iterations in which every tenant that waits and has credit keeps some."""
        found = FOR_EVER
        for tenant in {one.new.tenant for one in self.matched}:
            spent, credit = GENERATED * decoding.get(tenant, 0), self.credit[tenant]
            if spent and credit > 0:
                found = min(found, -(-credit // spent))
        return found

    def rank(self, one: EngineRequest) -> int:
        """Return when it came."""
        return one.order

    def __len__(self) -> int:
        return len(self.matched)

    def __iter__(self):
        return iter(self.matched)


class Dlpm(msgspec.Struct, frozen=True):
    """The policy; a tenant's ``number`` of tokens in a turn is usually what vLLM and SGLang compute in an iteration."""

    name: str = "dlpm"
    title: str = "the longest prefix in the cache first, of tenants with credit (DLPM)"
    goes_by: str = "tenant"
    number: float = 8192

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return CreditQueue(max(int(self.number), 1))


POLICY = Dlpm()
