"""Round robin: requests go to the replicas in turn."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.spec.requests import Requests


class RoundRobin(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "round-robin"
    title: str = "in turn"

    def assign(self, requests: Requests, replicas: int) -> np.ndarray:
        """Return the replica of every request [n]."""
        return np.arange(len(requests)) % replicas


POLICY = RoundRobin()
