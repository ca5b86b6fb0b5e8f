"""The Cluster: islands of identical devices, each a tree of levels, joined by an interconnect.

Ranks are numbered island by island, innermost level first, so a rank's place is arithmetic and a cluster of
100,000 devices costs no more than one of eight: nothing here makes a list of ranks.
"""

from __future__ import annotations

from math import gcd, inf, prod

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.hardware import Device, Level, Node

TYPICAL_PUE = 1.1
"""Power of the site over power of the machines where a cluster does not say: Google Environmental Report 2024,
fleet average of 2023."""

MOST_DEVICES = 1_000_000
"""Devices of the largest cluster that is answered for; the largest there are have some 200,000."""

NO_LEVEL = Level(name="none", arity=1, gb_s=inf, latency_us=0, topology="switch")
"""The level of an island at a depth that it does not have and another island does: one child, no limit, no latency."""


class Island(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identical devices on one fabric. `levels` from the inside out; their arities multiply to the device count."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    node: Node

    @property
    def num_devices(self) -> int:
        return prod(level.arity for level in self.levels)

    @property
    def devices_per_node(self) -> int:
        """Devices on one host; fewer than the standard node's when the island is smaller than a node."""
        return self.node.devices

    @property
    def num_nodes(self) -> int:
        return -(-self.num_devices // self.node.devices)

    @property
    def domain_size(self) -> int:
        """Devices that reach each other without a NIC (NVLink domain, xGMI node, ICI pod)."""
        return prod(level.arity for level in self.levels if not level.scale_out)


class Cluster(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Islands, in rank order, and the levels that join them (inner to outer; arities multiply to the islands).

    Attributes:
        pue: power drawn by the site over power drawn by the machines.
        price_usd_hour: price of the whole cluster for one hour; None: the sum over its devices.
        mtbf_hours: hours between unexpected interruptions of a job on the whole cluster; None: from the devices.
        power_limit_w: what the site can deliver to devices and hosts, overhead included; None: no limit is known.
        notes: what was said of the cluster and changes nothing.
    """

    name: str
    islands: tuple[Island, ...]
    interconnect: tuple[Level, ...] = ()
    title: str = ""
    pue: float = TYPICAL_PUE
    price_usd_hour: float | None = None
    mtbf_hours: float | None = None
    power_limit_w: float | None = None
    sources: dict[str, str] = {}
    notes: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        return sum(island.num_devices for island in self.islands)

    @property
    def shares_ports(self) -> bool:
        """Whether exchanges that meet on a port share it."""
        return any(level.shared_ports for island in self.islands for level in island.levels)

    def reaching(self, busbw_gb_s: dict[str, float]) -> Cluster:
        """The cluster on which collectives over all devices of an island reached so much, by operation
        (``Level.busbw_gb_s``); islands without a level between nodes stay as they are."""
        islands = []
        for island in self.islands:
            *inside, outermost = island.levels
            if outermost.scale_out:
                levels = (*inside, msgspec.structs.replace(outermost, busbw_gb_s=busbw_gb_s))
                island = msgspec.structs.replace(island, levels=levels)
            islands.append(island)
        return msgspec.structs.replace(self, islands=tuple(islands))

    @property
    def is_homogeneous(self) -> bool:
        """All islands hold the same device."""
        return all(island.device == self.islands[0].device for island in self.islands)

    @property
    def depth(self) -> int:
        """Levels above a device: those of the deepest island and the interconnect's."""
        return max(len(island.levels) for island in self.islands) + len(self.interconnect)

    def total_price_usd_hour(self) -> float | None:
        """US dollars for the whole cluster for one hour; None when a device has no known price."""
        if self.price_usd_hour is not None:
            return self.price_usd_hour
        prices = [island.device.price_usd_hour for island in self.islands]
        if any(price is None for price in prices):
            return None
        return sum(price * island.num_devices for price, island in zip(prices, self.islands))

    def interruption_hours(self) -> float | None:
        """Mean hours between interruptions of a job on all devices; failures of devices add up. None: unknown."""
        if self.mtbf_hours is not None:
            return self.mtbf_hours
        if any(island.device.mtbf_hours is None for island in self.islands):
            return None
        return 1 / sum(island.num_devices / island.device.mtbf_hours for island in self.islands)

    def island_range(self, index: int) -> range:
        """The ranks of one island."""
        first = sum(island.num_devices for island in self.islands[:index])
        return range(first, first + self.islands[index].num_devices)

    def island_index(self, rank: int) -> int:
        """Return the index of the island that a rank is on.

        Raises:
            MeshwrightError: C010 when the cluster has no such rank.
        """
        self._check_rank(rank)
        return next(index for index in range(len(self.islands)) if rank in self.island_range(index))

    def island_of(self, rank: int) -> Island:
        return self.islands[self.island_index(rank)]

    def device_of(self, rank: int) -> Device:
        return self.island_of(rank).device

    def location(self, rank: int) -> tuple[int, ...]:
        """A rank's place: its child number at each level of its island, inner to outer, then its island's number.

        On 8-device nodes rank 19 is at (3, 2, 0): device 3 of node 2 of island 0.
        """
        index = self.island_index(rank)
        rest, place = rank - self.island_range(index).start, []
        for level in self.islands[index].levels:
            rest, child = divmod(rest, level.arity)
            place.append(child)
        return (*place, index)

    def levels_of(self, rank: int) -> tuple[Level, ...]:
        """The `depth` levels above a rank, inner to outer, the interconnect's last: those of `group_shape`'s entries.

        Where islands differ in depth, `NO_LEVEL` stands for the levels a shallow one lacks.
        """
        own = self.island_of(rank).levels
        missing = self.depth - len(self.interconnect) - len(own)
        return (*own, *[NO_LEVEL] * missing, *self.interconnect)

    def group_shape(self, start: int, stride: int, size: int) -> tuple[int, ...]:
        """How a group of ranks ``start, start + stride, ...`` (`size` of them) lies on the tree.

        Entry i is the number of children the group touches under one parent of level i, inner to outer, taken
        where it is largest. 8-device nodes: stride 1, size 16 -> (8, 2); stride 8, size 4 -> (1, 4). The entries
        multiply to `size` when the group lies evenly, to more when it does not. Where islands differ in depth
        the shallow one counts 1 at the levels it lacks. Cost: levels, not ranks.

        Raises:
            MeshwrightError: C010 when a member is not a rank of this cluster, C011 for an empty group or stride < 1.
        """
        self._check_group(start, stride, size)
        depth = self.depth - len(self.interconnect)
        shape, touched = [1] * depth, []
        for index in range(len(self.islands)):
            ranks = self.island_range(index)
            begin = max(0, -(-(ranks.start - start) // stride))
            end = min(size, -(-(ranks.stop - start) // stride))
            if end <= begin:
                continue
            touched.append(index)
            offset = start + begin * stride - ranks.start
            for i, members in enumerate(_tree_shape(self.islands[index].levels, offset, stride, end - begin)):
                shape[i] = max(shape[i], members)
        return (*shape, *_interconnect_shape(self.interconnect, touched))

    def group_levels(self, start: int, stride: int, size: int) -> tuple[tuple[Level, int], ...]:
        """The levels a group really uses, inner to outer, each with the members it joins there (always > 1).

        Where islands differ, a level is the slowest of those the group touches at that depth.
        """
        shape = self.group_shape(start, stride, size)
        last = start + (size - 1) * stride
        touched = range(self.island_index(start), self.island_index(last) + 1)
        stacks = [self.levels_of(self.island_range(index).start) for index in touched]
        return tuple(
            (min(here, key=lambda level: level.busy_gb_s), members)
            for here, members in zip(zip(*stacks), shape)
            if members > 1
        )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_devices:
            raise MeshwrightError.one(
                "C010",
                f"rank {rank} is not on cluster {self.name}",
                place=f"cluster.num_devices = {self.num_devices}",
                help=f"ranks are 0 to {self.num_devices - 1}",
            )

    def _check_group(self, start: int, stride: int, size: int) -> None:
        if stride < 1 or size < 1:
            raise MeshwrightError.one(
                "C011",
                f"a group needs size >= 1 and stride >= 1, not size={size}, stride={stride}",
                help="a single rank is size=1, stride=1",
            )
        self._check_rank(start)
        self._check_rank(start + (size - 1) * stride)


def _tree_shape(levels: tuple[Level, ...], start: int, stride: int, size: int) -> list[int]:
    """Children touched under one parent at each level, the largest over parents, for an arithmetic progression."""
    shape, unit = [], 1
    for level in levels:
        shape.append(_children(start, stride, size, unit, level.arity))
        unit *= level.arity
    return shape


def _children(start: int, stride: int, size: int, unit: int, arity: int) -> int:
    last = start + (size - 1) * stride
    if stride <= unit:  # no child between the first and the last is skipped
        return _longest_run(start // unit, last // unit, arity)
    return _most_in_window(start, stride, size, unit * arity)  # every member is a child of its own


def _longest_run(first: int, last: int, arity: int) -> int:
    """The most of the children first..last that share one parent."""
    parents = last // arity - first // arity + 1
    if parents == 1:
        return last - first + 1
    return arity if parents > 2 else max(arity - first % arity, last % arity + 1)


def _most_in_window(start: int, stride: int, size: int, window: int) -> int:
    """The most members of the progression that fall in one aligned window of that length."""
    if stride >= window:
        return 1
    first, last = start // window, (start + (size - 1) * stride) // window
    most = -(-window // stride)
    # Where members fall in a window repeats after stride/gcd windows; the first and last may be cut short.
    phases = stride // gcd(stride, window)
    best = 0
    for w in {*range(first, min(last, first + phases + 1) + 1), last}:
        begin = max(0, -(-(w * window - start) // stride))
        end = min(size, -(-((w + 1) * window - start) // stride))
        best = max(best, end - begin)
        if best == most:
            break
    return best


def _interconnect_shape(levels: tuple[Level, ...], touched: list[int]) -> list[int]:
    """Children touched at each interconnect level by a set of islands."""
    shape, children = [], set(touched)
    for level in levels:
        parents: dict[int, int] = {}
        for child in children:
            parents[child // level.arity] = parents.get(child // level.arity, 0) + 1
        shape.append(max(parents.values()))
        children = set(parents)
    return shape
