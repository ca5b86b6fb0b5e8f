"""Least loaded: a request goes to the replica with the fewest open requests, of equals to the first."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright.serving.engine_request import NewRequest
from meshwright.serving.routing import ReplicaLoad


class LeastLoaded(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "least-loaded"
    title: str = "to the replica with the fewest open requests"
    looks: bool = True

    def choose(self, request: NewRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the replica with the fewest open requests."""
        return min(range(len(loads)), key=lambda one: (loads[one].open, one))


POLICY = LeastLoaded()
