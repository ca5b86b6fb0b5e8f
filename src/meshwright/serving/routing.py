"""Routing: the decider of which replica of an engine answers a request.

A policy either deals requests out by themselves (``assign``, before anything is simulated), or looks at the replicas
when a request arrives (``choose``); ``looks`` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from meshwright.serving.engine_request import NewRequest
from meshwright.spec.requests import Requests


class ReplicaLoad(Protocol):
    """A replica as a router sees it: requests ``waiting`` and ``running``, both together ``open``, and the ``tokens``
    that they hold or wait with."""

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def open(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def cached(self, hashes: tuple[int, ...]) -> int:
        """Return how many blocks of a prefix its cache has."""


class Router(Protocol):
    """A routing policy."""

    name: str
    title: str
    looks: bool

    def assign(self, requests: Requests, replicas: int) -> np.ndarray:
        """Return the replica of every request [n], of a policy that does not look."""

    def choose(self, request: NewRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the replica of a request, of a policy that looks."""


def opened(router: Router) -> Router:
    """Return a router for one run: of a policy that counts what it did (``open``) one that did nothing yet."""
    begin = getattr(router, "open", None)
    return router if begin is None else begin()
