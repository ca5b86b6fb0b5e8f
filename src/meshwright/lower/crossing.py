"""Flows between nodes on the links of a network whose switches are described: how much longer the busiest one takes.

What a group sends, all groups beside it send at the same time, so every port of every node is busy. A ring sends from
each node to the next of its group; an all-to-all to all others alike. Flows that leave a leaf switch (or a pod of them,
or a group of a dragonfly) share the links that lead out of it. Routing says how evenly: packets sprayed over all links
are the ideal; connections that a hash puts on one link each collide, and as a collective waits for its slowest flow,
the busiest of all links counts, in the mean over hashes.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, lgamma, log, log1p, sqrt
from typing import NamedTuple

import numpy as np

from meshwright.spec.wiring import Tier, Wiring, tiers


def crowding(wiring: Wiring, nics: int, nodes: int, rows: np.ndarray) -> tuple[float, float]:
    """Time of the busiest link between switches over the time of a node's port: (in a ring, in an all-to-all), each 1
    where no link is busier than a port.

    Args:
        nics: ports of a node. nodes: of the whole network.
        rows: (groups, members) the node of every member of all groups that are alike, in ring order.
    """
    found = tiers(wiring, nics, nodes)
    if not found:
        return 1.0, 1.0
    rows, times = np.unique(rows, axis=0, return_counts=True)
    source, target, weight = _ring(rows, times)
    ringed = exchanged = 1.0
    for tier in found:
        sets = ceil(nodes / tier.nodes)
        load = _between(source, target, weight * tier.ports, tier, sets)
        ringed = max(ringed, _busiest(wiring, tier, load, 1.0))
        load, peers = _exchanged(rows, times, tier, sets)
        exchanged = max(exchanged, _busiest(wiring, tier, load, peers))
    return ringed, exchanged


def _ring(rows: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sending node, receiving node and share of the sender's ports of every edge of the rings; a ring's steps inside a
    node are none of the network's."""
    source, target = rows.ravel(), np.roll(rows, -1, axis=1).ravel()
    count = np.repeat(times, rows.shape[1]).astype(float)
    apart = source != target
    source, target, count = source[apart], target[apart], count[apart]
    if not len(source):
        return source, target, count
    sent = np.bincount(source, count)
    return source, target, count / sent[source]


def _between(source: np.ndarray, target: np.ndarray, ports: np.ndarray, tier: Tier, sets: int) -> np.ndarray:
    """(sets, sets) ports' worth of flows from one set of nodes into another."""
    load = np.zeros((sets, sets))
    np.add.at(load, (source // tier.nodes, target // tier.nodes), ports)
    return load


def _exchanged(rows: np.ndarray, times: np.ndarray, tier: Tier, sets: int) -> tuple[np.ndarray, float]:
    """The same where every member sends to all other nodes of its group alike; and to how many nodes it sends."""
    load, peers, held = np.zeros((sets, sets)), 1.0, np.zeros(int(rows.max()) + 1)
    alone = []
    for row, count in zip(rows, times):
        nodes = np.unique(row)
        if len(nodes) > 1:
            alone.append((nodes, count))
            held[nodes] += count
    for nodes, count in alone:
        peers = max(peers, len(nodes) - 1.0)
        share = tier.ports * count / held[nodes]
        some = nodes // tier.nodes
        out = np.bincount(some, share, minlength=sets)
        into = np.bincount(some, minlength=sets)
        load += out[:, None] * into[None, :] / (len(nodes) - 1)
    return load, peers


def _busiest(wiring: Wiring, tier: Tier, load: np.ndarray, peers: float) -> float:
    """Ports' worth on the busiest link out of or into a set of nodes, at least 1; `peers` that a port's bytes go to."""
    apart = load.copy()
    np.fill_diagonal(apart, 0.0)
    most = max(apart.sum(0).max(), apart.sum(1).max())
    if most <= 0:
        return 1.0
    if wiring.kind == "dragonfly":
        return max(1.0, _over_groups(wiring.routing, apart, tier.links))
    if wiring.routing == "spray":
        return max(1.0, most / tier.links)
    pieces = wiring.connections * peers  # connections that a port's bytes are divided among
    flows = ceil(most * pieces - 1e-9)
    if wiring.routing == "ethereal":
        found = split_leftovers(np.ceil(apart * pieces - 1e-9).astype(np.int64), tier.links)
        return max(1.0, found.busiest / pieces)
    if wiring.routing == "planned":
        return max(1.0, ceil(flows / tier.links) / pieces)
    sending = np.count_nonzero(apart.sum(1)) + np.count_nonzero(apart.sum(0))
    return max(1.0, most / tier.links, expected_largest(flows, tier.links, int(sending)) / pieces)


class Split(NamedTuple):
    """Flows on paths: ``whole`` of them on each path between two sets of nodes (sets, sets), the number that are
    ``split``, and the ``busiest`` link out of or into a set, in flows."""

    whole: np.ndarray
    split: int
    busiest: float


def split_leftovers(flows: np.ndarray, paths: int) -> Split:
    """Assign equal flows between sets of nodes (sets, sets) to paths as Ethereal does (arXiv 2407.00550, section 3): as
    many whole flows on each of a pair's paths as go evenly, and only those left over are split into equal pieces."""
    whole, left = np.divmod(flows, paths)
    on_a_path = whole + left / paths
    return Split(whole, int(left.sum()), float(max(on_a_path.sum(0).max(), on_a_path.sum(1).max())))


def _over_groups(routing: str, apart: np.ndarray, links: int) -> float:
    """Ports' worth on the busiest link between groups of a dragonfly: directly, over a third group that is chosen at
    random (twice the flows, spread evenly), or whichever is better."""
    others = len(apart) - 1
    minimal = apart.max() / (links / others)
    valiant = 2 * max(apart.sum(0).max(), apart.sum(1).max()) / links
    return {"minimal": minimal, "valiant": valiant}.get(routing, min(minimal, valiant))


@lru_cache(maxsize=65536)
def expected_largest(flows: int, links: int, times: int) -> float:
    """Mean of the most flows on any link, where each of `flows` takes one of `links` by chance, `times` over.

    The loads of links are taken as independent binomial variables; as they add up to `flows`, the truth is a little
    less.
    """
    if links <= 1:
        return float(flows)
    mean, chance = flows / links, 1 / links
    most = min(flows, int(mean + 14 * sqrt(mean) + 40))
    least = max(0, int(mean - 14 * sqrt(mean)))
    loads = np.arange(least, most + 1)
    logs = [
        lgamma(flows + 1) - lgamma(k + 1) - lgamma(flows - k + 1) + k * log(chance) + (flows - k) * log1p(-chance)
        for k in loads.tolist()
    ]
    at_most = np.minimum(np.cumsum(np.exp(logs)), 1.0)
    return float(least + np.sum(1.0 - at_most ** (links * times)))
