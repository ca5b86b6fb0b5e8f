"""Messages between the replicas that meet, on the real links: how many pass the busiest port of each level.

Every rank of a replica sends to the ranks at the same place of those that hear it, all at once. A message crosses the
port of every child on its way between nodes and, inside a node, the level that joins its two ends. What a group sends,
all groups beside it send too (those of other tensor-parallel and pipeline ranks), through the same ports. Messages may
be of unequal sizes, and the ports of unequal islands are as wide as each is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from meshwright.lower.place import Mesh
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Level
from meshwright.work import Group, Hop

#: What one replica sends another: from, to, share of a group's bytes.
Message = tuple[int, int, float]


class Crossed(NamedTuple):
    """A level that messages cross: which of them (bool [messages]), the child of it that each rank is under, and what a
    byte takes through the port of that child, and through what the rank itself has of it, over a byte through the
    level's port [ranks]."""

    level: Level
    crossing: np.ndarray
    unit: np.ndarray
    slower: np.ndarray
    lone: np.ndarray


def meeting(mesh: Mesh, group: Group, start: int, messages: Sequence[Message]) -> Group:
    """The group of replicas around a rank as the levels that messages cross, with their ``messages``: those through the
    busiest port, or as many as would take the port as long where one rank's own is narrower."""
    source, target = ends(mesh, group, messages)
    size = np.tile([share for _, _, share in messages], len(source) // max(1, len(messages)))
    hops = []
    for level, crossing, unit, slower, lone in crossed(mesh, group, start, source, target):
        a, b, sent = source[crossing], target[crossing], size[crossing]
        ranks = np.arange(mesh.num_ranks)
        busiest = max(_busiest(of, some, sent, slow) for of, slow in ((unit, slower), (ranks, lone)) for some in (a, b))
        far = _distance(level, unit[a] % level.arity, unit[b] % level.arity)
        hops.append(
            Hop(
                name=level.name,
                members=len(np.unique(unit[np.concatenate((a, b))])),
                gb_s=level.busy_gb_s,
                latency_us=level.latency_us,
                below=1,
                topology=level.topology,
                scale_out=level.scale_out,
                messages=busiest * far,
            )
        )
    return Group(size=group.size, hops=tuple(hops), fan=_fan(messages))


def _fan(messages: Sequence[Message]) -> float:
    """Messages of the rank that sends or receives most, as so many whole ones."""
    sizes = [share for _, _, share in messages]
    return max(float(np.bincount([one[end] for one in messages], sizes).max()) for end in (0, 1))


def crossed(mesh: Mesh, group: Group, start: int, source: np.ndarray, target: np.ndarray) -> Iterator[Crossed]:
    """The levels that messages between ranks cross, from the inside out."""
    units, rates, own = _units(mesh)
    levels = mesh.levels(start, mesh.spans(group))
    outermost = np.zeros(len(source), np.int64)
    for depth in range(1, len(levels)):
        outermost[units[depth][source] != units[depth][target]] = depth
    for depth, level in enumerate(levels):
        crossing = (outermost >= depth) if level.scale_out else (outermost == depth)
        if not crossing.any():
            continue
        wide = np.where(rates[depth] > 0, rates[depth], level.busy_gb_s)
        lone = np.where(own[depth] > 0, own[depth], wide)
        if level.topology == "mesh":
            lone = np.minimum(wide, level.busy_gb_s / max(1.0, level.arity - 1.0))
        yield Crossed(level, crossing, units[depth], level.busy_gb_s / wide, level.busy_gb_s / lone)


def ends(mesh: Mesh, group: Group, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks that send and that receive, message by message, of all groups that are like this one."""
    places = np.zeros(1, np.int64)
    for stride, size in sorted(mesh.spans(group), reverse=True):
        places = (places[:, None] + stride * np.arange(size)).ravel()
    ranks = np.arange(mesh.num_ranks)
    inside = np.zeros(len(ranks), bool)  # ranks that are first of a group
    for stride, size in mesh.spans(group):
        inside |= ranks // stride % size > 0
    firsts = ranks[~inside]
    source, target = places[np.array([one[:2] for one in messages], np.int64).T]
    return (firsts[:, None] + source).ravel(), (firsts[:, None] + target).ravel()


def _units(mesh: Mesh) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """For each level and rank: the child of it that the rank is under, by a number of its own, the rate of that child's
    port and the rank's own part of it, GB/s, 0 where the level says it."""
    cluster, ranks = mesh.cluster, np.arange(mesh.num_ranks)
    depth = cluster.depth - len(cluster.interconnect)
    units = [np.zeros(len(ranks), np.int64) for _ in range(cluster.depth)]
    rates, own = ([np.zeros(len(ranks)) for _ in range(cluster.depth)] for _ in range(2))
    for index, island in enumerate(cluster.islands):
        held = cluster.island_range(index)
        mine = (ranks >= held.start) & (ranks < held.stop)
        nic, size = island.node.nic_gbit_s / 8 if island.node.nics else 0.0, 1
        for at in range(depth):
            level = island.levels[at] if at < len(island.levels) else None
            units[at][mine] = held.start + (ranks[mine] - held.start) // size
            rate = island.node.nics * nic if level is None else level.busy_gb_s
            least = min(rate, nic) if level is None or level.scale_out else 0.0
            rates[at][mine], own[at][mine] = rate, max(rate / max(1, size), least)
            size *= level.arity if level is not None else 1
        across = 1
        for outer, level in enumerate(cluster.interconnect):
            at, rate = depth + outer, _port(cluster, index, level) * across
            units[at][mine] = index // across
            rates[at][mine] = rate
            own[at][mine] = max(rate / max(1, island.num_devices * across), min(rate, nic))
            across *= level.arity
    return units, rates, own


def _port(cluster: Cluster, index: int, level: Level) -> float:
    """The rate at which an island reaches others, GB/s: that of all its NICs where the islands meet on the network of
    the narrowest, else what was said."""
    every = [island.num_nodes * island.node.nic_gb_s for island in cluster.islands]
    return every[index] * level.busy_gb_s / level.gb_s if min(every) == level.gb_s else level.busy_gb_s


def _busiest(unit: np.ndarray, some: np.ndarray, size: np.ndarray, slower: np.ndarray) -> float:
    """The most that the port of one unit carries of messages with one end at `some` ranks, as bytes through the level's
    port."""
    return float(np.bincount(unit[some], size * slower[some]).max())


def _distance(level: Level, source: np.ndarray, target: np.ndarray) -> float:
    """Return the links that a message crosses on average where only neighbours are joined, in a ring or a torus of two
    dimensions."""
    if level.topology not in ("ring", "torus"):
        return 1.0
    side = level.arity if level.topology == "ring" else max(1, round(sqrt(level.arity)))
    apart = np.zeros(len(source))
    for one, other in ((source % side, target % side), (source // side, target // side)):
        steps = np.abs(one - other)
        apart += np.minimum(steps, np.maximum(side - steps, 0)) if level.topology == "ring" else steps
    return max(1.0, float(apart.mean()))
