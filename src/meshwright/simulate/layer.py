"""The lowest zoom level: a pass over one layer, simulated once per kind of layer.

Gaps on the compute queue are exposed communication, named by the queue waited for; hidden communication still takes
SMs from the kernels it is overlapped with. The host's time to issue the kernels bounds the pass from below.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, log

import msgspec
import numpy as np

from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs, Estimate, Framework
from meshwright.cost.interference import slowdown
from meshwright.layers.moe import SORTED
from meshwright.lower.entry import Entry, Structure, graph_of, in_a_row, structure_of
from meshwright.lower.rewrites.slice import OFFLOADED, WATCHED
from meshwright.simulate.engine import Listed
from meshwright.spec.hardware import Device
from meshwright.work import Elementwise, GroupedGemm, Work

#: Relative spread of host times: they differ between hosts, and nobody states which one a step ran on.
HOST_SIGMA = 0.3
#: The 90th percentile of a normal distribution, in its standard deviations.
HIGH = 1.2816


class LayerCost(msgspec.Struct, frozen=True, kw_only=True):
    """A pass over one layer: seconds by cause [len(PRICED)], summing to its duration; ``spread`` those seconds times
    the relative error (one standard deviation) of their estimates; the operations done, and how many of them
    ``repeated`` forward work; ``wait`` the seconds of its exchanges in which the device is free for others. Where a
    layer's last exchange runs beside the next layer, ``drain`` are the seconds by which several layers take longer than
    each by itself: of the last one's exchange, which nothing hides."""

    parts: np.ndarray
    spread: np.ndarray
    flops: float
    repeated: float
    wait: float = 0.0
    drain: float = 0.0

    @property
    def seconds(self) -> float:
        return float(self.parts.sum())


def sigma_of_host(framework: Framework) -> float:
    """Return the relative error of a profile's host times."""
    return max(HOST_SIGMA, framework.host_sigma)


def estimates_of(entries: list[Entry], device: Device, costs: Costs, lag: float = 1.0) -> list[Estimate]:
    """Return the seconds and the spread of each operator of a pass, in order.

    Kernels take `lag` times as long, the straggler factor: time on the device over that on one of median speed; and
    longer by the framework's `kernel_slowdown`."""
    found = [costs.price(e.work, device) for e in entries]
    longer = lag * (1.0 + costs.framework.kernel_slowdown)
    if longer == 1.0:
        return found
    return [m._replace(seconds=m.seconds * longer) if e.queue == "compute" else m for e, m in zip(entries, found)]


#: CPU time of one cuBLAS call from a loop in C++, microseconds: a launch takes 2 to 3, choosing a kernel as much again.
LOOPED_CALL_US = 5.0


#: CPU time to launch a CUDA graph whose kernels follow one another, microseconds, however many they are (NVIDIA's
#: technical blog, "Constant Time Launch for Straight-Line CUDA Graphs", CUDA 12.6: 2.5 us and 1 ns a kernel).
GRAPH_LAUNCH_US = 2.5


#: Queues of what moves between device and host inside a layer, or is computed by the host.
MOVING = ("h2d", "d2h", "copy", "host")


def _waited(queue: str) -> int:
    """The cause of waiting for what is on a queue."""
    return CAUSE["offload" if queue in MOVING else queue]


def _issue_us(work: Work, costs: Costs, per_kernel: float) -> float:
    """CPU time to issue a work item's kernels: a grouped product is one operator of the framework that calls cuBLAS for
    every expert in a loop (Transformer Engine's GroupedLinear)."""
    if isinstance(work, GroupedGemm):
        return per_kernel + work.groups * min(per_kernel, LOOPED_CALL_US)
    if not isinstance(work, Elementwise):
        return per_kernel * (2 if costs.adds_apart(work) else 1)
    return per_kernel * costs.as_issued(work).kernels * costs.passes(work)


@lru_cache(maxsize=512)
def _listed(structure: Structure) -> tuple[Listed, list[int], list[bool]]:
    """The graph of a pass, the entry that each of its tasks is, and whether it is of the last layer in a row."""
    graph, last = graph_of(structure), in_a_row(structure) - 1
    return Listed(graph), graph.attribute("layer").tolist(), [step == last for step in graph.attribute("step").tolist()]


def cost(entries: Sequence[Entry], which: str, device: Device, costs: Costs, lag: float = 1.0) -> LayerCost:
    """Simulate a pass (``F``, ``B``, ``W``, ``BW``) over one layer and split its time by cause.

    `lag` is the straggler factor: the time of the slowest device that others wait for over that of a median one."""
    if not entries:
        return LayerCost(parts=np.zeros(len(PRICED)), spread=np.zeros(len(PRICED)), flops=0.0, repeated=0.0)
    parts, spread = [0.0] * len(PRICED), [0.0] * len(PRICED)  # read and written one by one: lists are faster
    graph, entry_of, counts = _listed(structure_of(entries))
    estimates = estimates_of(entries, device, costs, lag)
    start, end = graph.times([e.seconds for e in estimates])
    # of what a layer waits for of the one before it the ends are one layer early: they are over before its gaps end
    ended, clock = [0.0] * len(entries), 0.0
    for position, index in enumerate(entry_of):
        if counts[position]:
            ended[index] = end[position]
        elif entries[index].queue == "compute":
            clock = max(clock, end[position])
    begin = clock
    framework = costs.framework
    host_sigma = sigma_of_host(framework)
    per_kernel = framework.host_us_per_kernel
    backward_kernel = per_kernel if which == "F" else framework.backward_kernel_us
    graphed = framework.defaults.graphs and captured(entries)
    issue, flops, repeated = GRAPH_LAUNCH_US * 1e-6 * graphed, 0.0, 0.0
    for position, index in enumerate(entry_of):
        if not counts[position]:
            continue
        _, queue, work, after, again, role, before, _ = entries[index]
        if queue != "compute":
            issue += framework.host_us_per_collective * 1e-6 if role != OFFLOADED and not graphed else 0.0
            continue
        estimate = estimates[index]
        if not estimate.issued and not graphed:
            one = _issue_us(work, costs, per_kernel if again else backward_kernel) * 1e-6
            issue += one / work.slices if role == WATCHED else one
        done = getattr(work, "flops", 0.0)
        flops += done
        repeated += done if again else 0.0
        gap = start[position] - clock
        if gap > 0:
            late = max((a for a in after if entries[a].queue != "compute"), key=lambda a: ended[a], default=None)
            if late is None:
                late = next((a for a in before if entries[a].queue != "compute"), None)
            parts[_waited(entries[late].queue if late is not None else "tp")] += gap
        cause = CAUSE["recompute" if again else estimate.cause]
        parts[cause] += estimate.seconds
        apart = framework.passes_sigma if isinstance(work, Elementwise) and not work.fused else 0.0
        spread[cause] += estimate.seconds * max(estimate.sigma, apart)
        clock = end[position]
    total, drain = max(end), 0.0
    if total > clock and all(counts):
        parts[_waited(entries[ended.index(total)].queue)] += total - clock
    elif not all(counts):
        # so many layers in a row take more than as often the steady state: what nothing hides, less what the first
        # layer has no layer before it to wait for
        drain = max(0.0, total - in_a_row(structure_of(entries)) * (clock - begin))
    wait = 0.0
    for queue in ("tp", "cp", "ep", "dp"):
        mine = [estimate for entry, estimate in zip(entries, estimates) if entry.queue == queue]
        if not mine:
            continue
        seconds, exposed = sum(estimate.seconds for estimate in mine), parts[CAUSE[queue]]
        idle = sum(estimate.wait for estimate in mine) / seconds if seconds else 0.0
        wait += exposed * idle
        if device.cores:  # what is hidden needs a core as much as the kernels that hide it, but for the time it waits
            parts[CAUSE[queue]] += min(max(0.0, seconds - exposed), clock - begin) * (1 - idle)
        else:
            parts[CAUSE[queue]] += _slowed(queue, entries, estimates, (start, end), entry_of, begin, device)
        spread[CAUSE[queue]] = parts[CAUSE[queue]] * max(estimate.sigma for estimate in mine)
    moved = [estimate.sigma for entry, estimate in zip(entries, estimates) if entry.queue in MOVING]
    if moved:
        spread[CAUSE["offload"]] = parts[CAUSE["offload"]] * max(moved)
    total = float(np.sum(parts))
    stalled = sum(e.name == SORTED for e in entries) * framework.host_us_per_dispatch * 1e-6
    if device.synchronous:
        # issuing and running are the same core's work, one after the other
        parts[CAUSE["host"]] += issue
        spread[CAUSE["host"]] = issue * host_sigma
    elif issue > total:
        parts[CAUSE["host"]] += issue - total
        spread[CAUSE["host"]] = (issue - total) * _sigma_beyond(total, issue, host_sigma)
    parts[CAUSE["host"]] += stalled
    spread[CAUSE["host"]] += stalled * host_sigma
    return LayerCost(
        parts=np.array(parts), spread=np.array(spread), flops=flops, repeated=repeated, wait=wait, drain=drain
    )


def captured(entries: Sequence[Entry]) -> bool:
    """Return whether a CUDA graph can hold the pass: one with experts, whose numbers of tokens only the step tells, and
    one that moves state between tiers, are issued kernel by kernel."""
    return not any(isinstance(e.work, GroupedGemm) or e.name == SORTED or e.queue in MOVING for e in entries)


def _sigma_beyond(hidden: float, issue: float, sigma: float) -> float:
    """Return the relative error of what an issue time of this error leaves beyond what kernels hide: the less that is,
    the more of it the error. Equal to the issue time's where nothing is hidden; told by the 90th percentile."""
    return log((issue * exp(HIGH * sigma) - hidden) / (issue - hidden)) / HIGH


def _slowed(
    queue: str,
    entries: Sequence[Entry],
    estimates: list[Estimate],
    times: tuple[list[float], list[float]],
    entry_of: list[int],
    begin: float,
    device: Device,
) -> float:
    """Seconds that the kernels of a layer lose to the collectives of a queue that run beside them, pair by pair; the
    layer begins at `begin`. Memory that moves data by itself takes nothing from them."""
    start, end = times
    kernels = [p for p, i in enumerate(entry_of) if entries[i].queue == "compute" and start[p] >= begin]
    beside = [p for p, i in enumerate(entry_of) if entries[i].queue == queue and entries[i].role != OFFLOADED]
    lost, first = 0.0, 0
    for p in beside:
        while first < len(kernels) and end[kernels[first]] <= start[p]:
            first += 1
        work, seconds = entries[entry_of[p]].work, end[p] - start[p]
        for k in kernels[first:]:
            if start[k] >= end[p]:
                break
            together = min(end[k], end[p]) - max(start[k], start[p])
            lost += together * slowdown(estimates[entry_of[k]].cause, work, seconds, device)
    return lost
