"""Ranks that share processor cores: more processes on a host than it has cores, as on a laptop.

A device may be a core of a processor (``Device.cores``). When a node holds more ranks than
cores, passes and updates are flows of work over its cores, shared max-min fairly as an operating system shares them;
a rank that waits for a message leaves its share to the others. All else is timed as ever.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.graph import KIND
from meshwright.lower import Lowered
from meshwright.simulate import engine, events
from meshwright.simulate.engine import Times

#: Tasks that keep a core busy.
BUSY = tuple(KIND[name] for name in ("F", "B", "W", "BW", "optimizer"))


def crowded(lowered: Lowered) -> int:
    """Cores of a node that ranks have to share; 0 when every rank has one of its own, or is no core."""
    island = lowered.mesh.cluster.islands[0]
    cores, ranks = island.device.cores, min(lowered.mesh.num_ranks, island.node.devices)
    return cores if ranks > cores else 0


def times(lowered: Lowered, durations_s: NDArray[np.float64]) -> Times:
    """Start and end of every task of a lowered plan, seconds: the in-order engine's, unless cores are shared."""
    cores = crowded(lowered)
    if not cores:
        return engine.times(lowered.graph, durations_s)
    return _as_flows(lowered, durations_s, cores)


def _as_flows(lowered: Lowered, durations_s: NDArray[np.float64], cores: int) -> Times:
    """Work flows through its rank's own core, which takes a second a second, and through the cores of its node."""
    graph, island = lowered.graph, lowered.mesh.cluster.islands[0]
    nodes = -(-lowered.mesh.num_ranks // island.node.devices)
    busy = np.isin(graph.kind, BUSY)
    instant = durations_s.copy()
    instant[np.unique(graph.cost_key[busy])] = 0.0
    ranks = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    everybody = len(graph.streams.ranks)
    capacity = [float(m) for m in graph.streams.multiplicity] + [float(cores * nodes)]
    flows = {}
    for task in np.flatnonzero(busy).tolist():
        rank = int(ranks[task])
        count = graph.streams.multiplicity[rank]
        seconds = float(durations_s[graph.cost_key[task]])
        if seconds > 0:
            # a class of several ranks is that many flows in step: it crosses both as often
            flows[task] = (seconds, [rank] * count + [everybody] * count)
    moved = events.Transfers.of(graph.num_tasks, capacity, flows)
    return events.times(graph, instant, transfers=moved)
