"""Round robin: requests go to the replicas in turn."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.serving.engine_request import NewRequest
from meshwright.serving.routing import ReplicaLoad
from meshwright.spec.requests import Requests


class RoundRobin(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "round-robin"
    title: str = "in turn"
    looks: bool = False

    def assign(self, requests: Requests, replicas: int) -> np.ndarray:
        """Return the replica of every request [n]."""
        return np.arange(len(requests)) % replicas

    def choose(self, request: NewRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the replica whose turn it is."""
        return request.number % len(loads)


POLICY = RoundRobin()
