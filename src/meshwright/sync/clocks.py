"""Clocks of replicas: when each takes its gradient steps, and when which two meet, drawn by a seed.

The edges of a graph tick as Poisson processes, one rate for all; two replicas whose edge ticks meet, and no other waits
for them. In each unit of time every replica takes one gradient step, at a time drawn evenly within it, so that all take
as many. A prediction and a run draw the same ticks.

Between ticks momenta mix by a linear equation of six values (Nabli and Oyallon 2208.00779): x and its momentum, the
dual y of staying near the gradient and the dual z of agreeing with neighbours, each with a momentum. ClockConstants are
those of the authors' code, where ``condition`` is how many times as steep as it is flat a loss is, and 1 / (4 rate) its
steepest for a learning rate.
"""

from __future__ import annotations

from functools import lru_cache
from math import log, sqrt
from random import Random
from typing import NamedTuple

import msgspec

from meshwright.sync.groups import Graph, graph


class Tick(NamedTuple):
    """A replica's gradient step (``other`` is -1), or its meeting with another, ``at`` a time within a unit of it."""

    at: float
    replica: int
    other: int = -1


class ClockConstants(NamedTuple):
    """The numbers that values are multiplied with: between ticks (``mixing`` of momenta [6, 6], a unit of time), in a
    meeting (``agrees``, ``agrees_momentum``), and in a gradient step (``momentum`` rates over the learning rate,
    ``answers`` of the dual). ``flat``: the curvature that is taken from the loss and given to the duals."""

    mixing: tuple[tuple[float, ...], ...]
    agrees: float
    agrees_momentum: float
    momentum: float
    answers: float
    flat: float


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks on a ``graph``: a replica has so many ``meetings`` in a unit of time, in the mean (0: as many as the
    theory asks of the graph), for losses of a ``condition``; drawn by a ``seed``."""

    graph: str
    condition: float = 100.0
    meetings: float = 0.0
    seed: int = 1

    def rate(self, num_replicas: int) -> float:
        """Return the meetings of all replicas together in a unit of time."""
        if self.meetings:
            return self.meetings * num_replicas / 2
        first, second = resistances(graph(self.graph, num_replicas))
        return sqrt(2 * first * second)

    def ticks(self, num_replicas: int, unit: int) -> tuple[Tick, ...]:
        """Return the ticks of a unit of time, in their order."""
        return _ticks(self, num_replicas, unit)

    def of_replica(self, replica: int, num_replicas: int, unit: int) -> tuple[Tick, ...]:
        """Return the ticks of one replica, which is named first in each."""
        some = self.ticks(num_replicas, unit)
        return tuple(
            one if one.replica == replica else Tick(one.at, replica, one.replica)
            for one in some
            if replica in (one.replica, one.other)
        )

    def constants(self, num_replicas: int, rate: float) -> ClockConstants:
        """Return the constants of a learning rate, the largest of a run."""
        flat = sqrt(1 / (2 * self.condition))  # the root of nu / L, for nu half the curvature where a loss is flattest
        nu = flat * flat / (4 * rate)
        alpha, alpha_momentum, eta, theta = flat / 4, flat / 8, flat / 8, 1 / (2 * flat)
        mixing = (
            (-eta, eta, 0.0, 0.0, 0.0, 0.0),
            (eta, -eta, 0.0, 0.0, 0.0, 0.0),
            (0.0, 0.0, -alpha, alpha, 0.0, 0.0),
            (0.0, -theta * nu, -theta, 0.0, -theta, 0.0),
            (0.0, 0.0, 0.0, 0.0, -alpha, alpha),
            (0.0, 0.0, 0.0, 0.0, alpha_momentum, -alpha_momentum),
        )
        first, _ = resistances(graph(self.graph, num_replicas))
        spread = 2 * first / self.rate(num_replicas) / flat
        return ClockConstants(mixing, 0.5, spread, 1 / flat, flat / 4 + 1, nu)


def edges(some: Graph) -> tuple[tuple[int, int], ...]:
    """Return the pairs that meet on a graph whose neighbours stay."""
    return tuple((one.source, i) for i, heard in enumerate(some.turns[0]) for one in heard if one.source < i)


@lru_cache(maxsize=64)
def resistances(some: Graph) -> tuple[float, float]:
    """Return what a graph takes to agree, of its Laplacian with equal chances of all edges: the inverse of its smallest
    eigenvalue above 0, and half the largest resistance across an edge."""
    import numpy as np

    pairs = edges(some)
    laplacian = np.zeros((some.num_replicas, some.num_replicas))
    for i, j in pairs:
        laplacian[[i, j, i, j], [i, j, j, i]] += (1, 1, -1, -1)
    laplacian /= len(pairs)
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    across = [inverse[i, i] + inverse[j, j] - 2 * inverse[i, j] for i, j in pairs]
    return float(1 / np.linalg.eigvalsh(laplacian)[1]), float(max(across)) / 2


@lru_cache(maxsize=512)
def _ticks(clocks: Clocks, num_replicas: int, unit: int) -> tuple[Tick, ...]:
    draws, pairs = Random(repr((clocks.seed, unit))), edges(graph(clocks.graph, num_replicas))
    out = [Tick(draws.random(), replica) for replica in range(num_replicas)]
    rate, at = clocks.rate(num_replicas), 0.0
    while True:
        at += -log(1.0 - draws.random()) / rate
        if at >= 1.0:
            break
        out.append(Tick(at, *pairs[int(draws.random() * len(pairs))]))
    return tuple(sorted(out))
