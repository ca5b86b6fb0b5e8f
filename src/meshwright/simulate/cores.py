"""Ranks that share processor cores, as on a laptop: more processes than cores, or threads that move their messages.

A device may be a core of a processor (``Device.cores``). When a node holds as many ranks as it has cores, or more, what
its ranks compute and what their exchanges cost the processor are flows of work over its cores, shared max-min fairly as
an operating system shares them. A rank computes on one core at a time and its exchanges run on threads of their own; a
rank that waits, for a message or inside an exchange, leaves its share to the others.
"""

from __future__ import annotations

import numpy as np

from meshwright.graph import KIND
from meshwright.lower import Lowered
from meshwright.simulate import events
from meshwright.simulate.engine import Times
from meshwright.simulate.price import Priced

#: Tasks that keep a rank's own core busy; all others are exchanges.
OWN = tuple(KIND[name] for name in ("F", "B", "W", "BW", "optimizer"))


def crowded(lowered: Lowered) -> int:
    """Cores of a node that its ranks fill; 0 when there are more cores than ranks, or ranks are no cores."""
    island = lowered.mesh.cluster.islands[0]
    cores, ranks = island.device.cores, min(lowered.mesh.num_ranks, island.node.devices)
    return cores if ranks >= cores else 0


def processor_seconds(lowered: Lowered, priced: Priced) -> float:
    """Seconds of processor time of a step on all ranks together."""
    graph, work = lowered.graph, np.maximum(priced.durations - priced.wait, 0.0)
    members = np.array(graph.streams.multiplicity)[graph.streams.rank[graph.member]]
    return float((np.add.reduceat(members, graph.member_ptr[:-1]) * work[graph.cost_key]).sum())


def times(lowered: Lowered, priced: Priced) -> Times:
    """Start and end of every task of a lowered plan, seconds. Every task waits first and then is work. Links are each
    rank's own core, each rank's exchanges, which take no more than a core either, and the cores of all nodes; a second
    of work takes a second of each that it crosses."""
    graph, island = lowered.graph, lowered.mesh.cluster.islands[0]
    nodes = -(-lowered.mesh.num_ranks // island.node.devices)
    cores = nodes * island.device.cores
    work = np.maximum(priced.durations - priced.wait, 0.0)
    count, classes = graph.streams.multiplicity, len(graph.streams.ranks)
    capacity = [float(m) for m in (*count, *count)] + [float(cores)]
    own = np.isin(graph.kind, OWN).tolist()
    flows = {}
    for task in np.flatnonzero(work[graph.cost_key] > 0).tolist():
        first = 0 if own[task] else classes
        crossed = []
        for stream in graph.member[graph.member_ptr[task] : graph.member_ptr[task + 1]].tolist():
            rank = int(graph.streams.rank[stream])
            # a class of several ranks is that many flows in step: it crosses both as often
            crossed += [first + rank] * count[rank] + [2 * classes] * count[rank]
        flows[task] = (float(work[graph.cost_key[task]]), crossed)
    moved = events.Transfers.of(graph.num_tasks, capacity, flows)
    return events.times(graph, priced.durations - work, transfers=moved)
