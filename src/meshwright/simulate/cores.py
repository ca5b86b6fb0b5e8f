"""Ranks that share processor cores, as on a laptop: more processes than cores, or threads that move their messages.

A device may be a core of a processor (``Device.cores``). When a node holds as many ranks as it has cores, or more, what
its ranks compute and what their exchanges cost the processor are flows of work over its cores, shared max-min fairly as
an operating system shares them. A rank computes on one core at a time and its exchanges run on threads of their own; a
rank that waits, for a message or inside an exchange, leaves its share to the others. Where there are more ranks than
cores they take turns, and what each computes takes longer (``Device.crowding``): it finds another's data in the
caches. Ranks on other devices share nothing.
"""

from __future__ import annotations

from collections import Counter
from math import log2
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.graph import KIND
from meshwright.lower import Lowered
from meshwright.lower.place import Mesh
from meshwright.plan.slices import kinds
from meshwright.simulate import events
from meshwright.simulate.engine import Times
from meshwright.simulate.price import Priced
from meshwright.spec.hardware import Device

#: Tasks that keep a rank's own core busy; all others are exchanges.
OWN = tuple(KIND[name] for name in ("F", "B", "W", "BW", "optimizer"))


class Host(NamedTuple):
    """A node whose devices are cores, and the plan's ranks on them."""

    device: Device
    ranks: range

    @property
    def cores(self) -> int:
        return self.device.cores


def hosts(mesh: Mesh) -> list[Host]:
    """The nodes of cores that the plan uses, in the order of their ranks."""
    out = []
    for index, island in enumerate(mesh.cluster.islands):
        held, width = mesh.cluster.island_range(index), island.node.devices
        stop = min(held.stop, mesh.num_ranks)
        if island.device.cores:
            out += [Host(island.device, range(i, min(i + width, stop))) for i in range(held.start, stop, width)]
    return out


def crowded(lowered: Lowered) -> bool:
    """Whether there is a node with as many ranks as it has cores, or more."""
    return any(len(host.ranks) >= host.cores for host in hosts(lowered.mesh))


def processor_seconds(lowered: Lowered, priced: Priced) -> float:
    """Seconds of processor time of a step on all ranks together."""
    graph, nodes = lowered.graph, hosts(lowered.mesh)
    work = _work(lowered, priced, nodes, _held(lowered, nodes))
    members = np.array(graph.streams.multiplicity)[graph.streams.rank[graph.member]]
    return float((np.add.reduceat(members, graph.member_ptr[:-1]) * work).sum())


def times(lowered: Lowered, priced: Priced) -> Times:
    """Start and end of every task of a lowered plan, seconds. A task of ranks on cores waits first and then is work.
    Links are each rank's own core, each rank's exchanges, which take no more than a core either, and the cores of every
    node; a second of work takes a second of each that it crosses."""
    graph, nodes = lowered.graph, hosts(lowered.mesh)
    held = _held(lowered, nodes)  # by rank class
    counts, classes = [h.total() for h in held], len(held)
    capacity = [float(max(c, 1)) for c in (*counts, *counts)] + [float(node.cores) for node in nodes]
    work = _work(lowered, priced, nodes, held)
    waits, seconds = np.minimum(priced.wait, priced.durations)[graph.cost_key], priced.durations[graph.cost_key]
    own = np.isin(graph.kind, OWN).tolist()
    flows = {}
    for task in np.flatnonzero(work > 0).tolist():
        first = 0 if own[task] else classes
        crossed = []
        for stream in graph.member[graph.member_ptr[task] : graph.member_ptr[task + 1]].tolist():
            rank = int(graph.streams.rank[stream])
            # a class of several ranks is that many flows in step: it crosses links as often
            crossed += [first + rank] * counts[rank]
            crossed += [2 * classes + node for node in held[rank].elements()]
        if crossed:
            flows[task] = (float(work[task]), crossed)
            seconds[task] = waits[task]
    moved = events.Transfers.of(graph.num_tasks, capacity, flows)
    # tasks of one cost key may be work for cores on some ranks and not on others
    each = msgspec.structs.replace(graph, cost_key=np.arange(graph.num_tasks))
    return events.times(each, seconds, transfers=moved)


def _work(lowered: Lowered, priced: Priced, nodes: list[Host], held: list[Counter[int]]) -> np.ndarray:
    """Seconds of every task [N] in which a rank's processor is busy."""
    graph, crowding = lowered.graph, np.zeros(len(held))
    for number, ranks in enumerate(held):
        shared = [(nodes[n].device, len(nodes[n].ranks) / nodes[n].cores) for n in ranks]
        crowding[number] = max((d.crowding * log2(times) for d, times in shared if times > 1), default=0.0)
    of = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    busy = np.maximum(priced.durations - priced.wait, 0.0)[graph.cost_key]
    return busy * (1 + crowding[of] * np.isin(graph.kind, OWN))


def _held(lowered: Lowered, nodes: list[Host]) -> list[Counter[int]]:
    """Return the number of ranks of every rank class on each node."""
    node_of = np.full(lowered.mesh.num_ranks, -1)
    for number, node in enumerate(nodes):
        node_of[node.ranks.start : node.ranks.stop] = number
    return [one for part in lowered.parts for one in _of_mesh(part.mesh, node_of[part.begin :])]


def _of_mesh(mesh: Mesh, node_of: np.ndarray) -> list[Counter[int]]:
    """Return the number of ranks of every rank class on each node, for a mesh that begins at the first of these
    ranks."""
    layout = mesh.layout
    shard = np.add.outer(np.arange(layout.tp) * layout.stride("tp"), np.arange(layout.cp) * layout.stride("cp"))
    out = []
    for kind in kinds(layout, mesh.cluster):
        starts = np.array(kind.members) * layout.stride("dp")
        for stage in range(layout.pp):
            found = node_of[np.add.outer(starts + stage * layout.stride("pp"), shard)]
            out.append(Counter(found[found >= 0].tolist()))
    return out
