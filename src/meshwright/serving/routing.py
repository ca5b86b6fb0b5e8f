"""Routing: the decider of which replica of an engine answers a request."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from meshwright.spec.requests import Requests


class Router(Protocol):
    """A routing policy that looks at the requests alone, and not at how busy the replicas are."""

    name: str
    title: str

    def assign(self, requests: Requests, replicas: int) -> np.ndarray:
        """Return the replica of every request [n]."""
