"""Collectives by algorithm over the real tree of levels.

The alpha-beta model (Hockney, 1994; Thakur et al., 2005) per algorithm, the fastest chosen as NCCL does. Over
several levels a ring passes every child's port once, so the slowest port sets its bandwidth; the pipelined
tree pays fewer hops; in-network reduction (NVLS, SHARP) halves what crosses each port.
"""

from __future__ import annotations

from math import ceil, log2

from meshwright.work import Collective, Group, Hop

#: Start of one collective kernel, launch to first byte, seconds. NCCL's smallest all-reduce over 2 H100 takes
#: 6 us and one over 8 takes 15 us (nccl-tests figures of NCCL 2.29): a start plus about 1.4 us per ring step.
START_S = 4.0e-6
#: Share of a port's raw bandwidth that large messages reach. NVLink: 322 of 450 GB/s (H100), 193 of 300 (A100),
#: 601 of 900 (B300) for all-gather over 8 devices of NCCL 2.27-2.29; networks: protocol headers and congestion.
PORT_EFFICIENCY = {False: 0.72, True: 0.85}


def collective_seconds(work: Collective) -> float:
    """Seconds of one collective on each of its ranks; 0 for a group of one."""
    group = work.group
    if group.size <= 1 or work.num_bytes <= 0:
        return 0.0
    return START_S + _ALGORITHMS[work.op](work.num_bytes, group)


def port_bytes_s(hop: Hop) -> float:
    return hop.gb_s * 1e9 * PORT_EFFICIENCY[hop.scale_out]


def _ring_latency(group: Group) -> float:
    """One trip around: every member is a step, most of them inside the innermost level."""
    steps = 0.0
    for hop in group.hops:
        outer = 1
        for other in group.hops:
            if other.below > hop.below:
                outer *= other.members
        crossings = (hop.members - 1) * outer if hop.below == 1 else hop.members
        steps += crossings * hop.latency_us * 1e-6
    return steps


def _tree_latency(group: Group) -> float:
    return sum(ceil(log2(h.members)) * h.latency_us * 1e-6 for h in group.hops)


def _slowest_port(group: Group) -> float:
    return min(port_bytes_s(h) for h in group.hops)


def _gather(num_bytes: float, group: Group) -> float:
    """Ring all-gather or reduce-scatter of `num_bytes` in all; a hierarchical one pays fewer slow steps."""
    n = group.size
    flow = (n - 1) / n * num_bytes / _slowest_port(group)
    return flow + min(_ring_latency(group), _tree_latency(group) + START_S)


def _all_reduce(num_bytes: float, group: Group) -> float:
    n = group.size
    ring = 2 * (n - 1) / n * num_bytes / _slowest_port(group) + 2 * _ring_latency(group)
    tree = 2 * num_bytes / _slowest_port(group) + 2 * _tree_latency(group) + START_S
    best = min(ring, tree)
    if all(h.reduces for h in group.hops):
        # Switches add up: each port sends the buffer once and receives it once.
        best = min(best, num_bytes * (n + 1) / n / _slowest_port(group) + 2 * _tree_latency(group) + START_S)
    return best


def _all_to_all(num_bytes: float, group: Group) -> float:
    """Every child's port carries what its members send outside it; levels work side by side."""
    n, flow, latency = group.size, 0.0, 0.0
    for hop in group.hops:
        outside = num_bytes * hop.below * (1 - hop.below / n)
        if hop.topology in ("ring", "torus"):
            outside *= max(1.0, hop.members / 8)  # neighbours only: the bisection carries members/8 of each port
        flow = max(flow, outside / port_bytes_s(hop))
        latency += (hop.members - 1 if hop.below == 1 else log2(hop.members)) * hop.latency_us * 0.5e-6
    return flow + latency


def _send(num_bytes: float, group: Group) -> float:
    hop = group.hops[-1]
    return num_bytes / port_bytes_s(hop) + hop.latency_us * 1e-6


def _broadcast(num_bytes: float, group: Group) -> float:
    return num_bytes / _slowest_port(group) + _tree_latency(group)


_ALGORITHMS = {
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_to_all": _all_to_all,
    "send": _send,
    "broadcast": _broadcast,
}
