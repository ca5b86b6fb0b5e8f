"""Passes over a graph's buckets on the virtual clock: seconds of the first and of every one after it."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.graph import QUEUE
from meshwright.lower.bucket_training import BucketTraining, bucket_training
from meshwright.plan.record import Plan
from meshwright.simulate.engine import times
from meshwright.simulate.price import Pricer
from meshwright.spec.cluster import Cluster
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graphs import NodeEmbedding
from meshwright.timeline import Timeline, from_times

#: Where the time of a pass goes, in the order it is shown; sums to it (mean over devices).
PLACES: dict[str, str] = {
    "training": "kernels over the samples of buckets",
    "swapping": "exposed transfers of partitions and samples",
    "sampling": "waiting for samples that host threads make",
    "others": "waiting for devices that hold or end a bucket later",
}
#: Queues of a device that move partitions and samples.
SWAPPING = ("h2d", "d2h", "nvme", "link_forward", "link_backward", "copy")


class BucketTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Timed passes: ``first_s`` of the first, ``pass_s`` of every one after it, whose time goes to ``places``; the
    relative error ``sigma`` of the prices."""

    lowered: BucketTraining
    timeline: Timeline
    first_s: float
    pass_s: float
    places: dict[str, float]
    sigma: float


def time_buckets(model: NodeEmbedding, plan: Plan, cluster: Cluster, work: EdgeSamples, costs: Costs) -> BucketTimes:
    """Time the passes of a legal plan with ``dp`` filled in."""
    lowered = bucket_training(model, plan, cluster, work)
    priced = Pricer(costs).all(lowered.programs)
    said = lowered.seconds >= 0
    durations = np.where(said, lowered.seconds, priced.durations * lowered.repeats)
    start, end = times(lowered.graph, durations)
    timeline = from_times(lowered.graph, start, end)
    trained = lowered.graph.attribute("step")
    ends = [float(end[trained == number].max()) for number in range(len(lowered.last))]
    count = np.bincount(lowered.graph.cost_key, minlength=len(lowered.programs))
    spread = np.where(said, 0.0, priced.spread.sum(axis=1) * lowered.repeats)
    known = float(count @ durations)
    return BucketTimes(
        lowered=lowered,
        timeline=timeline,
        first_s=ends[0],
        pass_s=ends[-1] - ends[-2],
        places=_places(timeline, ends[-2], ends[-1], bool(work.walk)),
        sigma=float(np.sqrt(((count * spread) ** 2).sum())) / known if known else 0.0,
    )


def _places(timeline: Timeline, begin: float, end: float, made: bool) -> dict[str, float]:
    """Seconds from `begin` to `end` by :data:`PLACES`, mean over devices: while a device trains nothing it swaps, or
    waits for samples, or for others."""
    devices = len(timeline.ranks) - 1
    making = (timeline.rank == devices) & (timeline.queue == QUEUE["host"])
    total = dict.fromkeys(PLACES, 0.0)
    for device in range(devices):
        mine = timeline.rank == device
        moves = mine & np.isin(timeline.queue, [QUEUE[name] for name in SWAPPING])
        free = [(begin, end)]
        chosen = [("training", mine & (timeline.queue == QUEUE["compute"])), ("swapping", moves)]
        for place, which in (*chosen, *((("sampling", making),) if made else ())):
            busy = sorted(zip(timeline.start_s[which].tolist(), timeline.end_s[which].tolist()))
            free, took = _without(free, busy)
            total[place] += took / devices
        total["others"] += sum(b - a for a, b in free) / devices
    return total


def _without(
    free: list[tuple[float, float]], busy: list[tuple[float, float]]
) -> tuple[list[tuple[float, float]], float]:
    """The parts of some stretches in which nothing is `busy`, and the seconds of the others; both are sorted, and no
    two stretches of `free` overlap."""
    out, took, first = [], 0.0, 0
    busy = _joined(busy)
    for begin, end in free:
        at = begin
        while first < len(busy) and busy[first][1] <= begin:
            first += 1
        for place in range(first, len(busy)):
            start, stop = busy[place]
            if start >= end:
                break
            if start > at:
                out.append((at, start))
            took += min(stop, end) - max(start, at)
            at = min(stop, end)
        if at < end:
            out.append((at, end))
    return out, took


def _joined(busy: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted stretches, of which those that overlap are one."""
    out: list[tuple[float, float]] = []
    for start, stop in busy:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out
