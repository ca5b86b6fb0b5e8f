"""Pass 1: where ranks are. Mesh axes become groups of ranks on the cluster's levels, with the bandwidth each gets.

Ranks that do the same work on the same device with the same neighbours are one class with a multiplicity; a
cluster of equal devices has one class per pipeline rank, whatever its size. On unequal islands the
data-parallel slices are folded by the devices they run on (``plan/slices.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import prod

import msgspec
import numpy as np

from meshwright.graph import RankClass
from meshwright.lower.crossing import crowding
from meshwright.plan import Plan
from meshwright.plan.slices import SliceKind, kinds
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Device, Level
from meshwright.sync.fragments import expert_scope
from meshwright.sync.paths import MODULE
from meshwright.sync.policy import read
from meshwright.sync.scoped import FAR, GRADIENT_SHARD, NEAR, OPTIMIZER_SHARD, WEIGHT_SHARD, nested
from meshwright.work import Group, Hop, HostLinks, MeasuredBusBandwidth


def _adds_up(level: Level) -> bool:
    """Whether a network's switches add up all-reduces for this job."""
    return level.scale_out and level.wiring is not None and level.wiring.sharp


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A class of data-parallel slices: ``multiplicity`` pipelines that look alike; ``starts[r]`` is the first rank of
    pipeline rank r of one of them, ``devices[r]`` the (slowest) device there."""

    multiplicity: int
    starts: tuple[int, ...]
    devices: tuple[Device, ...]


class Mesh:
    """A plan's axes on a cluster: rank arithmetic, groups, rank classes."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        groups: dict[tuple, Group] | None = None,
        apart: tuple[tuple[int, ...], ...] = (),
    ):
        """`groups` are shared between meshes of as many ranks of a cluster. `apart`: classes of data-parallel slices
        (indices along dp) that differ in more than their devices; each is of one kind."""
        self.plan, self.cluster, self.apart = plan, cluster, apart
        self.layout = plan.layout
        self.num_ranks = plan.layout.num_ranks
        self._groups: dict[tuple, Group] = {} if groups is None else groups
        self._named: dict[tuple, Group] = {}

    @property
    def alike(self) -> bool:
        """Whether all ranks run on equal devices, so that it does not matter where a group begins."""
        return len(self.cluster.islands) == 1

    @cached_property
    def _kinds(self) -> tuple[SliceKind, ...]:
        """The kinds of slices that train: peers that only sum have links, and no passes."""
        found, trainers = kinds(self.layout, self.cluster), self.plan.trainers
        if trainers == self.layout.dp:
            return found
        some = (kind._replace(members=tuple(d for d in kind.members if d < trainers)) for kind in found)
        return tuple(kind for kind in some if kind.members)

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        along, across, ranks = self.layout.stride("pp"), self.layout.stride("dp"), range(self.layout.pp)
        found = self._kinds
        members = self.apart or tuple(kind.members for kind in found)
        return tuple(
            Slice(
                multiplicity=len(some),
                starts=tuple(some[0] * across + r * along for r in ranks),
                devices=found[kind].devices,
            )
            for some, kind in zip(members, self.kinds_of_slices)
        )

    @cached_property
    def kinds_of_slices(self) -> tuple[int, ...]:
        """The kind of devices of every class of slices, by its number."""
        found = self._kinds
        if not self.apart:
            return tuple(range(len(found)))
        kind_of = {member: number for number, kind in enumerate(found) for member in kind.members}
        return tuple(kind_of[some[0]] for some in self.apart)

    @cached_property
    def held(self) -> tuple[float, ...]:
        """The part of the state that ZeRO shards which one rank of every class of slices holds."""
        layout, hold = self.layout, self.plan.kinds.hold
        if not hold:
            return (1 / layout.shard_group,) * len(self.kinds_of_slices)
        members = (len(kind.members) for kind in kinds(layout, self.cluster))
        whole = layout.cp * sum(count * size for count, size in zip(members, hold))
        return tuple(hold[kind] / whole for kind in self.kinds_of_slices)

    @property
    def padding(self) -> float:
        """How much larger the largest shard is than the mean: messages of collectives are as long on all ranks."""
        return max(self.held) * self.layout.shard_group if self.plan.kinds.hold else 1.0

    def group(self, *axes: str, start: int = 0) -> Group:
        """The ranks that vary along `axes` (``tp``, ``cp``, ``dp``, ``pp``) from `start`."""
        spans = [(self.layout.stride(a), getattr(self.layout, a)) for a in axes]
        return self._span(tuple(sorted((s, n) for s, n in spans if n > 1)), start)

    def along(self, stride: int, size: int) -> Group:
        """So many ranks a stride apart, on an axis that a plan has no name for."""
        return self._span(((stride, size),) if size > 1 else (), 0)

    def among(self, name: str, start: int = 0) -> Group:
        """The group that a fragment is exchanged over, by the name it has there."""
        layout = self.layout
        if name in ("shard", "replica"):
            return self.hybrid_groups(layout.shard_group, "cp", "dp", start=start)[name == "replica"]
        if name in (WEIGHT_SHARD, GRADIENT_SHARD, OPTIMIZER_SHARD, NEAR, FAR):
            return self._scoped(name, start)
        if name == "data":
            return self.hybrid_groups(layout.dp * layout.cp, "cp", "dp", start=start)[0]
        if name == "worker":
            return self._worker(start)
        if name in ("cp", "dp"):
            return self.group(name, start=start)
        if name.startswith(MODULE):
            return self._module(int(name.removeprefix(MODULE)), start)
        return self.expert_group(name, start)

    def _scoped(self, name: str, start: int) -> Group:
        """The ranks of a scope of one kind of state, besides those that share the scopes inside it."""
        before, spans = 1, {}
        for among in nested(self.plan):
            outer = self._hybrid(before, ("cp", "dp"))[1]
            spans[among.name] = _split(outer, among.size)[0]
            before *= among.size
        return self._span(tuple(spans[name]), start)

    def _worker(self, start: int) -> Group:
        """All ranks that take the same optimizer step."""
        inside, _ = self._hybrid(read(self.plan.sync.policy).rule.together(self.plan), ("cp", "dp"))
        spans = [(self.layout.stride(a), getattr(self.layout, a)) for a in ("tp", "pp")]
        return self._span(tuple(sorted([*inside, *((s, n) for s, n in spans if n > 1)])), start)

    def _module(self, level: int, start: int) -> Group:
        """The ranks at the place of `start` in the replicas that hold the same module of a level."""
        policy = read(self.plan.sync.policy)
        spans = self._hybrid(policy.rule.together(self.plan), ("cp", "dp"))[1]
        ((stride, replicas),) = spans or [(1, 1)]
        block, size = policy.paths.block(level, replicas), policy.paths.levels[level]
        replica = start // stride % replicas
        first = start - (replica - replica // block % size * block) * stride
        around = [(stride, block), (stride * block * size, replicas // (block * size))]
        return self._span(tuple(one for one in around if one[1] > 1), first)

    def expert_group(self, axis: str, start: int = 0) -> Group:
        """A group of the expert mesh, which refactors tp*cp*dp as etp, ep, edp from the inside out."""
        found = self._named.get((axis, start))
        if found is None:
            found = self._named[axis, start] = self._expert(axis, start)
        return found

    def _expert(self, axis: str, start: int) -> Group:
        plan = self.plan
        expert, scope = plan.etp * plan.experts.ep, expert_scope(plan)
        sizes = {
            "etp": (1, plan.etp),
            "ep": (plan.etp, plan.experts.ep),
            "ep_inner": (plan.etp, plan.experts.ep_inner),
            "ep_outer": (plan.etp * plan.experts.ep_inner, plan.experts.ep // plan.experts.ep_inner),
            "edp": (expert, plan.edp),
            "expert_shard": (expert, scope),
            "expert_replica": (expert * scope, plan.edp // scope),
        }
        stride, size = sizes[axis]
        if size == 1:
            return self._span((), start)
        # the group that `start` is in begins at the first of its members
        inside = start % self.layout.stride("pp") if self.layout.order[-1] == "pp" else start
        first = start - inside // stride % size * stride
        return self._span(tuple(self._unfold(stride, size)), first)

    def _unfold(self, stride: int, size: int) -> list[tuple[int, int]]:
        """Real (stride, size) spans of a span in the space of ranks without the pipeline axis."""
        block, pp = self.layout.stride("pp"), self.layout.pp
        if stride * size <= block:
            return [(stride, size)]
        if stride >= block:
            return [(stride * pp, size)]
        return [(stride, block // stride), (block * pp, stride * size // block)]

    def hybrid_groups(self, size: int, *axes: str, start: int = 0) -> tuple[Group, Group]:
        """(sharding group, replication group) when state is sharded over the innermost `size` of the axes."""
        inner, outer = self._hybrid(size, axes)
        return self._span(tuple(inner), start), self._span(tuple(outer), start)

    def _hybrid(self, size: int, axes: tuple[str, ...]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the spans of the innermost `size` ranks of the axes, and those of the outer ones."""
        return _split(sorted((self.layout.stride(a), getattr(self.layout, a)) for a in axes), size)

    def spans(self, group: Group) -> tuple[tuple[int, int], ...]:
        """Where the ranks of a group that this mesh made lie: its (stride, size) spans."""
        return next(spans for (spans, _), known in self._groups.items() if known is group)

    def pair(self, a: int, b: int) -> Group:
        """Two ranks that send to each other."""
        low, high = min(a, b), max(a, b)
        return self._span(((high - low, 2),), low) if high > low else Group(size=1, hops=())

    def hosted(self, group: Group) -> Group:
        """The group with the links of its hosts, of each kind the slowest that any host has."""
        inside = [hop for hop in group.hops if not hop.scale_out]
        joined = bool(inside) and inside[0].topology != "pcie"
        nodes = [island.node for island in self.cluster.islands]
        roots = [node.root_port_gb_s / node.root_port_devices for node in nodes if node.root_port_gb_s]
        links = HostLinks(
            devices=min(max(node.devices for node in nodes), self.num_ranks),
            members=prod(hop.members for hop in inside),
            paired=inside[0].members if joined else 1,
            copy_gb_s=min(node.copies_gb_s for node in nodes),
            root_gb_s=min(roots, default=0.0),
            memory_gb_s=min(node.read_gb_s for node in nodes),
            numa_nodes=max(node.numa_nodes for node in nodes),
            nic_gb_s=min(node.nic_gb_s for node in nodes),
        )
        return msgspec.structs.replace(group, host=links)

    def _span(self, spans: tuple[tuple[int, int], ...], start: int) -> Group:
        if len(self.cluster.islands) == 1 and len(spans) != 1:
            start = 0
        key = (spans, start)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self._build(spans, start)
        return found

    def _build(self, spans: tuple[tuple[int, int], ...], start: int) -> Group:
        merged: list[tuple[int, int]] = []
        for stride, n in spans:
            if merged and merged[-1][0] * merged[-1][1] == stride:
                merged[-1] = (merged[-1][0], merged[-1][1] * n)
            else:
                merged.append((stride, n))
        size = 1
        members = [1] * self.cluster.depth
        for stride, n in merged:
            size *= n
            for i, m in enumerate(self.cluster.group_shape(start, stride, n)):
                members[i] *= m
        hops, below, devices = [], 1, 1
        node = self.cluster.island_of(start).node
        levels = self.levels(start, merged)
        reached, outermost = self._reached(levels, node.devices)
        for i, (level, count) in enumerate(zip(levels, members)):
            if count > 1:
                # Under one child sit `devices` ranks and `below` of this group: the siblings share its port, those of
                # one stage at the same time. A rank that is alone drives one whole NIC, where there are fewer of them
                # than devices, and no more than its own share where there are as many.
                ranks = min(devices, self.num_ranks)
                share = min(1.0, below / ranks)
                if level.scale_out and node.nics:
                    alone = min(1.0, node.nic_gbit_s / 8 / level.busy_gb_s)
                    at_once = min(1.0, below / max(1, ranks // self._stages_under(ranks)))
                    share = max(share, min(alone * below, at_once, 1.0) if at_once > share else share)
                if level.topology == "mesh":
                    share *= (count - 1) / max(1, level.arity - 1)  # direct links: only those to members carry
                gb_s = level.busy_gb_s
                if level.scale_out and node.direct_gb_s and devices == node.devices:  # a host's own ports
                    gb_s = min(gb_s, node.direct_gb_s * max(1, node.nics))
                ringed, exchanged, forwarded = self._crossing(level, merged, start, devices, below)
                hops.append(
                    Hop(
                        wired=level.wiring is not None,
                        ringed=ringed,
                        exchanged=exchanged,
                        forwarded=forwarded,
                        name=level.name,
                        members=count,
                        gb_s=gb_s * share,
                        latency_us=level.latency_us,
                        below=below,
                        topology=level.topology,
                        # NVLink switches add up by default; SHARP on a network needs a plugin that few jobs load
                        reduces=(level.in_network_reduction and not level.scale_out) or _adds_up(level),
                        scale_out=level.scale_out,
                        reached=reached if level.scale_out and i <= outermost else None,
                        children=level.arity if level.topology == "pcie" else 0,
                    )
                )
            below *= count
            devices *= max(level.arity, 1)
        return Group(size=size, hops=tuple(hops))

    def _crossing(
        self, level: Level, spans: list[tuple[int, int]], start: int, devices: int, below: int
    ) -> tuple[float, float, float]:
        """How many times as long as a port the busiest link between switches takes in a ring and in an all-to-all, and
        the share of an all-to-all's bytes between nodes that is forwarded inside one first: (1, 1, 0) where nothing is
        known of the switches. `devices` ranks, `below` of the group, are under one child of the level."""
        wiring = level.wiring
        if wiring is None:
            return 1.0, 1.0, 0.0
        island = self.cluster.island_of(start)
        first = self.cluster.island_range(self.cluster.island_index(start)).start
        held = range(first, min(first + island.num_devices, self.num_ranks))
        ranks = np.arange(held.start, held.stop)
        places, leads = np.zeros(1, np.int64), np.ones(len(ranks), bool)
        for stride, size in sorted(spans, reverse=True):
            places = (places[:, None] + stride * np.arange(size)).ravel()
            leads &= ranks // stride % size == start // stride % size
        rows = ranks[leads][:, None] + places[None, :]
        rows = rows[(rows < held.stop).all(axis=1)]
        nics = max(1, island.node.nics * devices // island.node.devices)
        nodes = -(-island.num_devices // devices)
        if not len(rows):
            return 1.0, 1.0, 0.0
        ringed, exchanged = crowding(wiring, nics, nodes, (rows - first) // devices)
        return ringed, exchanged, 1 - 1 / below if wiring.kind == "rail-only" else 0.0

    def _stages_under(self, ranks: int) -> int:
        """How many stages of the pipeline have ranks among so many next to each other."""
        return min(self.layout.pp, max(1, ranks // self.layout.stride("pp")))

    def levels(self, start: int, spans: Iterable[tuple[int, int]]) -> tuple[Level, ...]:
        """Levels from the inside out; where islands differ, the slower of the two ends at each depth."""
        cluster = self.cluster
        first = cluster.levels_of(start)
        last = cluster.levels_of(start + sum((n - 1) * stride for stride, n in spans))
        if first is last or len(first) != len(last):
            return max(first, last, key=len)
        return tuple(min(pair, key=lambda level: level.busy_gb_s) for pair in zip(first, last))

    def _reached(self, levels: tuple[Level, ...], node_devices: int) -> tuple[MeasuredBusBandwidth | None, int]:
        """Return the bus bandwidths measured over all devices under a level, with the port of a node, and the level's
        index: the outermost that has any; (None, -1) where none has."""
        ranks, found, at, port = 1, None, -1, 0.0
        for i, level in enumerate(levels):
            ranks *= max(level.arity, 1)
            if level in self.cluster.interconnect:
                ranks = self.cluster.num_devices  # islands need not be alike
            port = port or (level.busy_gb_s if level.scale_out else 0.0)
            if level.busbw_gb_s:
                found = MeasuredBusBandwidth(
                    ranks=ranks,
                    nodes=max(2, ranks // node_devices),
                    gb_s=port,
                    busbw_gb_s=tuple(sorted(level.busbw_gb_s.items())),
                )
                at = i
        return found, at


def _split(spans: list[tuple[int, int]], size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Spans of ranks cut in two: those of the innermost `size`, and those of the outer ones."""
    inner, outer, left = [], [], size
    for stride, n in spans:
        take = min(n, left)
        if take > 1:
            inner.append((stride, take))
        if n // take > 1:
            outer.append((stride * take, n // take))
        left = max(1, left // take)
    return inner, outer


def first_of_group(mesh: Mesh, rank: int) -> int:
    """Return the first rank that differs from `rank` in its place on cp and dp alone; 0 where all ranks are alike."""
    if mesh.alike:
        return 0
    for axis in ("cp", "dp"):
        stride = mesh.layout.stride(axis)
        rank -= rank // stride % getattr(mesh.layout, axis) * stride
    return rank


def rank_classes(mesh: Mesh) -> tuple[RankClass, ...]:
    """The rank classes: a pipeline rank of a class of slices each."""
    per_slice = mesh.layout.tp * mesh.layout.cp
    return tuple(
        RankClass(
            slice=index if len(mesh.slices) > 1 else -1,
            stage=stage,
            device=kind.devices[stage].name,
            multiplicity=per_slice * kind.multiplicity,
        )
        for index, kind in enumerate(mesh.slices)
        for stage in range(mesh.layout.pp)
    )
