"""All-reduces that hosts add up: devices copy to host memory, cores sum, a double tree joins hosts, copies go back.

HFReduce (An et al., arXiv 2408.14158, section IV), for devices without links of their own. Every device copies its
buffer to its host's memory by its copy engine, the host's cores add up what its devices brought, hosts sum over a
double binary tree by messages from and to their memory, and cores write the result to the devices of each processor,
reading it once for all of them. All is done in chunks, one after the other, so that in a long buffer every link carries
something all the time and the busiest sets the pace. Where devices are paired (an NVLink bridge), each pair sums among
itself first, each of the two copies half, and gathers the other half at the end.

What a byte of the buffer puts on each shared link is counted here (:func:`host_flows`); the sum of memory's is the 24
times of the paper's section IV-D for eight devices and many hosts.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from meshwright.cost.fabric import Constants, uncontended
from meshwright.work import Group, HostLinks

#: Messages of a double tree, each way, and what is read to add what was received, over what is sent.
SENT, RECEIVED, ADDED = 1.0, 1.0, 0.5


class HostFlows(NamedTuple):
    """Times that the buffer passes each shared link of a host for one sum of every group on it: ``copied`` a device's
    own link each way; ``rooted`` a device's share of a root port, both ways together; ``memory`` the host's memory,
    reads and writes; ``sent`` its network ports, each way; ``paired`` a link between paired devices each way."""

    copied: float
    rooted: float
    memory: float
    sent: float
    paired: float


def host_flows(host: HostLinks, hosts: int) -> HostFlows:
    """Return what a sum over so many hosts puts on the links of one."""
    groups = host.devices / host.members
    copies = host.members / host.paired  # buffers' worth that arrive in memory
    tree = 2 * (hosts - 1) / hosts  # half of the buffer in each of two trees, up and down
    added = copies + 1 if copies > 1 else 0.0  # all read, the sum written
    back = min(host.numa_nodes, copies)  # read once by the cores of each processor, for all of its devices
    between = (SENT + RECEIVED + ADDED) * tree
    return HostFlows(
        copied=1 / host.paired,
        rooted=2 / host.paired,
        memory=groups * (copies + added + between + back),
        sent=groups * tree,
        paired=2 * (host.paired - 1) / host.paired,
    )


def host_lines(group: Group, fabrics: tuple[Constants, ...]) -> tuple[tuple[float, float], ...]:
    """Return the one line (seconds at no bytes, seconds a byte) of a sum that hosts add up."""
    host = group.host
    assert host is not None, "the links of the group's hosts"
    outside = [(hop, fabric) for hop, fabric in zip(group.hops, fabrics) if hop.scale_out]
    hosts = 1
    for hop, _ in outside:
        hosts *= hop.members
    flows = host_flows(host, hosts)
    rates = [flows.copied / host.copy_gb_s, flows.memory / host.memory_gb_s]
    rates += [flows.rooted / host.root_gb_s] if host.root_gb_s else []
    if host.paired > 1:
        hop, fabric = group.hops[0], fabrics[0]
        slower = min(fabric.reduce_scatter, fabric.all_gather)
        rates.append(flows.paired / (hop.gb_s * uncontended(hop, fabric) * slower))
    start_us, above = 2 * fabrics[0].message_simple_us, hosts
    for depth, (hop, fabric) in enumerate(outside):
        # a tree's messages are sends from one host's memory to another's, past no device
        own = host.nic_gb_s * host.members / host.devices if depth == 0 else 0.0
        port = own or hop.gb_s
        busy = 2 * (above - 1) / above * hop.ringed / (port * fabric.send)
        rates.append(busy)
        steps = 2 * ceil(log2(hop.members))
        start_us += steps * (fabric.message_simple_us + hop.latency_us * fabric.step_simple)
        above //= hop.members
    return ((start_us * 1e-6, max(rates) * 1e-9),)
