"""Words of a cluster's network that change nothing: those of the network between nodes where there is one node."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright.spec.cluster_names import Term
from meshwright.spec.cluster_tree import Cluster, Island
from meshwright.spec.cluster_words import Words


def unused(terms: list[Term], cluster: Cluster) -> Iterator[str]:
    """Yield a line for each island that says words of a network which it does not have, with the cluster that has it.

    An island that meets others has ports to them, and its switches alone are without use.
    """
    for term, island in zip(terms, cluster.islands, strict=True):
        if any(level.scale_out for level in island.levels):
            continue
        words = term.words
        said = Words(wired=words.wired)
        if len(cluster.islands) == 1:
            said = Words(nic=words.nic, nics=words.nics, delay_s=words.delay_s, wired=words.wired)
        if said != Words():
            alone = _alone(term, island)
            yield f"{said.text()[1:]} changes nothing: it is of a network between nodes, and {alone}"


def _alone(term: Term, island: Island) -> str:
    """Return what an island without a network is, and the islands that have one."""
    devices, said = island.num_devices, term.words.text()
    bare = msgspec.structs.replace(term, words=Words()).text
    if island.num_nodes > 1:
        joined = f"the {devices} devices of {bare} are joined by {island.levels[-1].name} alone"
        return f"{joined}; 2x{devices}x{term.name}{said} is two such domains on a network"
    if term.second is None and term.first < devices:  # machines are counted
        return f"{bare} is one node; 2x{term.name}{said} is two"
    one_each = f", {devices}x1x{term.name}{said} is {devices} nodes of one device" if devices > 1 else ""
    return f"{bare} is one node; 2x{devices}x{term.name}{said} is two such nodes{one_each}"
