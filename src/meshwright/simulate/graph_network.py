"""An epoch of a graph network on the virtual clock."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs
from meshwright.graph import QUEUE
from meshwright.lower.graph_network import NetworkEpoch, network_epoch
from meshwright.plan.record import Plan
from meshwright.simulate.engine import times
from meshwright.simulate.price import Pricer
from meshwright.spec.cluster import Cluster
from meshwright.spec.graph_epochs import GraphEpochs
from meshwright.spec.graphs import GraphNetwork
from meshwright.timeline import Timeline, from_times

#: Where the time of an epoch goes, in the order it is shown; sums to it (mean over stages).
PLACES: dict[str, str] = {
    "aggregation": "sparse products over edges, activations and other memory-bound kernels",
    "gemm": "products with weights",
    "optimizer": "update of weights",
    "boundary": "exposed exchange of vertices that others need, and of their gradients",
    "sums": "exposed sums of gradients of weights",
    "bubble": "waiting for other stages and their messages",
}


class NetworkTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A timed epoch of ``seconds``, which go to ``places``; ``busy_s`` is what all exchanges of the busiest stage take,
    hidden or not; the relative error ``sigma`` of the prices."""

    lowered: NetworkEpoch
    timeline: Timeline
    seconds: float
    places: dict[str, float]
    busy_s: float
    sigma: float


def time_network(model: GraphNetwork, plan: Plan, cluster: Cluster, work: GraphEpochs, costs: Costs) -> NetworkTimes:
    """Time an epoch of a legal plan with ``dp`` filled in."""
    lowered = network_epoch(model, plan, cluster, work)
    priced = Pricer(costs).all(lowered.programs)
    start, end = times(lowered.graph, priced.durations)
    parts = {cause: priced.parts[:, i] for i, cause in enumerate(PRICED) if priced.parts[:, i].any()}
    timeline = from_times(lowered.graph, start, end, parts=parts)
    count = np.bincount(lowered.graph.cost_key, minlength=len(lowered.programs))
    known = float((count @ priced.parts).sum())
    spread = float(np.sqrt(((count @ priced.spread) ** 2).sum()))
    queues = [QUEUE[name] for name in ("ep", "dp", "pp_forward", "pp_backward")]
    moving = np.isin(timeline.queue, queues)
    length = timeline.end_s - timeline.start_s
    busy = [float(length[moving & (timeline.rank == stage)].sum()) for stage in range(len(timeline.ranks))]
    return NetworkTimes(
        lowered=lowered,
        timeline=timeline,
        seconds=float(end.max()),
        places=_places(timeline, priced.parts, float(end.max())),
        busy_s=max(busy),
        sigma=spread / known if known else 0.0,
    )


def _places(timeline: Timeline, parts: np.ndarray, makespan: float) -> dict[str, float]:
    """Seconds of the epoch by :data:`PLACES`, mean over stages: what is not computed is an exchange that runs then, or
    a wait."""
    total, stages = dict.fromkeys(PLACES, 0.0), len(timeline.ranks)
    exchange = {QUEUE["ep"]: "boundary", QUEUE["dp"]: "sums"}
    for stage in range(stages):
        mine = np.flatnonzero((timeline.rank == stage) & (timeline.queue == QUEUE["compute"]))
        mine = mine[np.argsort(timeline.start_s[mine], kind="stable")]
        others = np.flatnonzero((timeline.rank == stage) & np.isin(timeline.queue, list(exchange)))
        clock = 0.0
        for span in (*mine.tolist(), -1):
            begins = float(timeline.start_s[span]) if span >= 0 else makespan
            left = max(0.0, begins - clock)
            if left > 0:
                for queue, place in exchange.items():
                    some = others[timeline.queue[others] == queue]
                    ran = np.minimum(timeline.end_s[some], begins) - np.maximum(timeline.start_s[some], clock)
                    spent = min(left, float(np.maximum(ran, 0.0).sum()))
                    total[place] += spent / stages
                    left -= spent
                total["bubble"] += left / stages
            if span < 0:
                break
            for cause, place in CAUSE.items():
                where = cause if cause in ("gemm", "optimizer") else "aggregation"
                total[where] += float(parts[int(timeline.cost_key[span]), place]) / stages
            clock = float(timeline.end_s[span])
    return total
