"""The bill of a cluster's network: switches, links, US dollars and watts, where its switches are described."""

from __future__ import annotations

from math import prod

from meshwright.spec.cluster_tree import Cluster
from meshwright.spec.wiring import Bill, bill


def network_bill(cluster: Cluster) -> Bill | None:
    """The parts between the nodes of all islands; None where no island says what its switches are."""
    found = []
    for island in cluster.islands:
        for depth, level in enumerate(island.levels):
            if level.wiring is not None:
                under = prod(inner.arity for inner in island.levels[:depth])
                nics = max(1, island.node.nics * under // max(1, island.node.devices))
                found.append(bill(level.wiring, nics, level.arity, island.node.nic_gbit_s))
    if not found:
        return None
    usd = None if any(one.usd is None for one in found) else sum(one.usd for one in found)
    watts = None if any(one.watts is None for one in found) else sum(one.watts for one in found)
    source = "; ".join(dict.fromkeys(one.source for one in found))
    return Bill(sum(one.switches for one in found), sum(one.links for one in found), usd, watts, source)
