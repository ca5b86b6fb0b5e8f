"""A part of a cluster: neighbouring devices cut out of its tree, as a cluster of their own."""

from __future__ import annotations

import msgspec

from meshwright.spec.cluster_tree import Cluster, Island
from meshwright.spec.hardware import Level


def cut(cluster: Cluster, first: int, end: int) -> Cluster | None:
    """The devices `first` to `end` (without it) as a cluster; None where they are no such part of the tree: each level
    has to be cut at whole children, or inside one."""
    if not 0 <= first < end <= cluster.num_devices:
        return None
    if (first, end) == (0, cluster.num_devices):
        return cluster
    islands, touched = [], []
    for index, island in enumerate(cluster.islands):
        ranks = cluster.island_range(index)
        begin, stop = max(first, ranks.start) - ranks.start, min(end, ranks.stop) - ranks.start
        if begin >= stop:
            continue
        levels = _levels(island, begin, stop)
        if levels is None:
            return None
        islands.append(msgspec.structs.replace(island, levels=levels))
        touched.append(index)
    joining = cluster.interconnect if len(touched) == len(cluster.islands) else _between(cluster, touched)
    share = (end - first) / cluster.num_devices
    price = None if cluster.price_usd_hour is None else cluster.price_usd_hour * share
    return msgspec.structs.replace(
        cluster, islands=tuple(islands), interconnect=joining, price_usd_hour=price, power_limit_w=None
    )


def _levels(island: Island, begin: int, stop: int) -> tuple[Level, ...] | None:
    """The levels above some devices of an island, from the inside out."""
    out, unit = [], 1
    for level in island.levels:
        if begin % unit or stop % unit:
            return None
        above = unit * level.arity
        inside = begin // above == (stop - 1) // above
        out.append(_narrowed(level, (stop - begin) // unit) if inside else level)
        if inside:
            # what is above joins one child
            begin = stop = 0
            out += [msgspec.structs.replace(outer, arity=1, shape=()) for outer in island.levels[len(out) :]]
            return tuple(out)
        unit = above
    return None


def _narrowed(level: Level, children: int) -> Level:
    """A level with some of its children. Of direct links only those between them carry."""
    if children == level.arity:
        return level
    speed = level.gb_s
    if level.topology == "mesh":
        speed *= (children - 1) / max(1, level.arity - 1)
    return msgspec.structs.replace(level, arity=children, gb_s=max(speed, 1e-3), shape=())


def _between(cluster: Cluster, touched: list[int]) -> tuple[Level, ...]:
    """The interconnect of some islands next to each other."""
    if len(touched) <= 1:
        return ()
    out, count = [], len(touched)
    for level in cluster.interconnect:
        arity = min(level.arity, count)
        out.append(msgspec.structs.replace(level, arity=arity, shape=() if arity != level.arity else level.shape))
        count = -(-count // arity)
    return tuple(out)
