"""Double deficit longest prefix match: a tenant's requests follow its prefixes to a replica as long as the tenant has
credit there (Cao et al. 2025, 2501.14312, section 4.3).

Every tenant has a credit at every replica. A request goes to the replica that has most of its prompt, of those where
its tenant has credit, and is charged there: one for each token of the prompt that is not in the cache, two for each
token that it may generate. Where a tenant has none anywhere it gets a quantum at each. So a tenant's load spreads over
the replicas as its quanta run out, and ``order=dlpm`` shares out each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.serving.engine_request import NewRequest
from meshwright.serving.routing import ReplicaLoad
from meshwright.serving.vtc import GENERATED, PROMPT


class Credits:
    """Credits of tenants at replicas: what each may still ask there (``left``), by (tenant, replica)."""

    def __init__(self, quantum: int):
        self.quantum = quantum
        self.left: dict[tuple[int, int], int] = {}

    def choose(self, request: NewRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the replica of a request, and charge it."""
        places = [(request.tenant, one) for one in range(len(loads))]
        left = [self.left.setdefault(place, self.quantum) for place in places]
        if max(left) <= 0:
            more = self.quantum * (-max(left) // self.quantum + 1)
            left = [one + more for one in left]
            self.left.update(zip(places, left))
        cached = [load.cached(request.hashes) for load in loads]
        able = [one for one in range(len(loads)) if left[one] > 0]
        chosen = min(able, key=lambda one: (-cached[one], loads[one].open, one))
        there = cached[chosen] / len(request.hashes) if request.hashes else 0.0
        self.left[places[chosen]] -= PROMPT * round(request.prompt * (1.0 - there)) + GENERATED * request.limit
        return chosen


class D2lpm(msgspec.Struct, frozen=True):
    """The policy; its ``number`` is the quantum of tokens."""

    name: str = "d2lpm"
    title: str = "to the replica that has most of its prompt, where its tenant has credit (D2LPM)"
    goes_by: str = "tenant"
    number: float = 8192
    looks: bool = True

    def open(self) -> Credits:
        """Return a router that nobody asked anything."""
        return Credits(max(int(self.number), 1))

    def choose(self, request: NewRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the replica of a first request."""
        return self.open().choose(request, loads)


POLICY = D2lpm()
