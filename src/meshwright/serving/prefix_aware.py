"""Prefix-aware: a request goes to the replica whose cache has most of its prompt, unless that is overloaded.

As in SGLang's and llm-d's routers: where the replica with the most open requests has more than 64 and more than half
again as many as the one with the fewest, or no replica has more than 30% of the prompt, the one with the fewest open
requests is taken (the defaults of the SGLang router, docs/concepts/routing/cache-aware).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.serving.engine_request import NewRequest
from meshwright.serving.routing import ReplicaLoad

#: The share of a prompt's blocks that is worth following, and from when on replicas are out of balance.
LEAST_SHARE, MOST_MORE, MOST_TIMES = 0.3, 64, 1.5


class PrefixAware(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "prefix-aware"
    title: str = "to the replica that has most of its prompt, unless that is overloaded"
    goes_by: str = "hashes"
    looks: bool = True

    def choose(self, request: NewRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the replica that has most of the prompt, or the one with the fewest open requests."""
        opened = [load.open for load in loads]
        fewest = min(range(len(loads)), key=lambda one: (opened[one], one))
        most = max(opened)
        if not request.hashes or (most > opened[fewest] + MOST_MORE and most > MOST_TIMES * opened[fewest]):
            return fewest
        cached = [load.cached(request.hashes) for load in loads]
        best = min(range(len(loads)), key=lambda one: (-cached[one], opened[one], one))
        return best if cached[best] > LEAST_SHARE * len(request.hashes) else fewest


POLICY = PrefixAware()
