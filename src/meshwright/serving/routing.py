"""Routing: the decider of which replica of an engine answers a request.

A policy either deals requests out by themselves (``assign``, before anything is simulated), or looks at the replicas
when a request arrives (``choose``); ``looks`` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from meshwright.spec.requests import Requests


class ReplicaLoad(NamedTuple):
    """A replica as a router sees it: requests waiting and running, and the tokens that they hold or wait with."""

    waiting: int
    running: int
    tokens: int

    @property
    def open(self) -> int:
        """Requests that are not answered."""
        return self.waiting + self.running


class Router(Protocol):
    """A routing policy."""

    name: str
    title: str
    looks: bool

    def assign(self, requests: Requests, replicas: int) -> np.ndarray:
        """Return the replica of every request [n], of a policy that does not look."""

    def choose(self, number: int, loads: Sequence[ReplicaLoad]) -> int:
        """Return the replica of the request of that number, of a policy that looks."""
