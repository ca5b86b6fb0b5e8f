"""Wiring of a network between nodes: which switches ports lead to, what these are joined by, and how flows are routed.

Four ways to wire the ports of many nodes are known. A *fat tree* (Leiserson, 1985; Al-Fares et al., 2008) puts all
ports of a node on one leaf switch. A *rail* network gives port i of every node to the leaves of rail i, so that ranks
at one place of their nodes meet in one switch. A *rail-only* network (Wang et al., arXiv 2307.12169) leaves out what
joins the rails: what goes to another rail is forwarded inside a node. A *dragonfly* (Kim et al., ISCA 2008) joins all
switches of a group, and every two groups. Here is the geometry: how many ports sit under a switch or a group of them,
and how many links lead out of it. What flows then do to one another is :mod:`meshwright.lower.crossing`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import Literal

import msgspec

from meshwright import catalog

Kind = Literal["fat-tree", "rail", "rail-only", "dragonfly"]
Routing = Literal["spray", "ecmp", "ethereal", "planned", "minimal", "valiant", "adaptive"]
KINDS: tuple[str, ...] = ("fat-tree", "rail", "rail-only", "dragonfly")
#: Ways to choose among several paths: over the switches of a tree, and over the groups of a dragonfly.
ROUTINGS = {
    "fat-tree": ("spray", "ecmp", "ethereal", "planned"),
    "rail": ("spray", "ecmp", "ethereal", "planned"),
    "rail-only": ("spray", "ecmp", "ethereal", "planned"),
    "dragonfly": ("adaptive", "minimal", "valiant"),
}
#: Ports of a switch where the catalog has none for the network's rate.
USUAL_RADIX = 64
MOST_RADIX = 4096


class Wiring(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True):
    """How the ports of a level between nodes are joined.

    Attributes:
        kind: ``fat-tree``, ``rail``, ``rail-only`` or ``dragonfly``.
        radix: ports of one switch.
        taper: links from a leaf down over links up: 2 halves what leaves a leaf; 1 has full bisection.
        routing: among the paths between two leaves. ``spray``: packets over all, the ideal; ``ecmp``: each connection
            on one path by a hash; ``planned``: each on one path, chosen centrally so that none has more than another
            (C4P, arXiv 2406.04594); ``ethereal``: the same, and the connections left over are split (arXiv
            2407.00550). Of a dragonfly: ``minimal``, ``valiant`` over a random group, ``adaptive``.
        connections: queue pairs between two ports, among which their bytes are divided.
        sharp: the switches add up all-reduces between nodes (InfiniBand SHARP with its plugin loaded).
    """

    kind: Kind
    radix: int
    taper: float = 1.0
    routing: Routing = "spray"
    connections: int = 1
    sharp: bool = False

    def text(self) -> str:
        """The words that say it, as a cluster's short name takes them."""
        said = [self.kind, f"radix={self.radix}"]
        said += [f"taper={self.taper:g}"] if self.taper != 1 else []
        said += [f"routing={self.routing}"] if self.routing != ROUTINGS[self.kind][0] else []
        said += [f"qps={self.connections}"] if self.connections != 1 else []
        said += ["sharp"] if self.sharp else []
        return ",".join(said)

    @property
    def down(self) -> int:
        """Ports of a leaf switch that lead to nodes: of a dragonfly a quarter, half of the rest joining its group."""
        if self.kind == "dragonfly":
            return self.radix // 4
        return max(1, round(self.radix * self.taper / (1 + self.taper)))

    @property
    def up(self) -> int:
        """Ports of a leaf switch that lead out of it, towards spines or other groups."""
        return max(1, self.radix // 4) if self.kind == "dragonfly" else max(1, self.radix - self.down)


class Tier(msgspec.Struct, frozen=True):
    """Sets of nodes that links lead out of: ``nodes`` each (next to each other, in rank order), of which ``ports`` a
    node lie on one plane of the network, and ``links`` leave a set on that plane."""

    nodes: int
    ports: int
    links: int


class Bill(msgspec.Struct, frozen=True):
    """Parts of a network between nodes.

    ``links`` are cables, two transceivers each; ``usd`` and ``watts`` of switches and transceivers, None where the
    catalog knows no switch of this rate; ``source`` says whose prices they are."""

    switches: int
    links: int
    usd: float | None
    watts: float | None
    source: str

    @property
    def transceivers(self) -> int:
        return 2 * self.links


class NetworkSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """A network switch of the catalog: ports of a rate, US dollars and watts of it and of one transceiver."""

    title: str
    gbit_s: float
    ports: int
    watts: float
    transceiver_watts: float
    sources: dict[str, str]
    usd: float | None = None
    transceiver_usd: float | None = None


def switch_for(gbit_s: float) -> NetworkSwitch | None:
    """The catalog's switch whose ports have a rate, in 1e9 bits/s; None where there is none."""
    found = (msgspec.convert(row, NetworkSwitch) for row in catalog.tables("switches").values())
    return next((switch for switch in found if 0.95 <= switch.gbit_s / gbit_s <= 1.05), None) if gbit_s else None


def usual_radix(gbit_s: float) -> int:
    """Ports of a switch where nobody says."""
    switch = switch_for(gbit_s)
    return switch.ports if switch is not None else USUAL_RADIX


def ports_of_a_plane(wiring: Wiring, nics: int) -> int:
    """Ports of one node on one plane: rails are planes of one port each."""
    return 1 if wiring.kind in ("rail", "rail-only") else max(1, nics)


def leaf_nodes(wiring: Wiring, nics: int) -> int:
    """Nodes whose ports of one plane sit on one leaf switch, at least one."""
    return max(1, wiring.down // ports_of_a_plane(wiring, nics))


@lru_cache(maxsize=4096)
def tiers(wiring: Wiring, nics: int, nodes: int) -> tuple[Tier, ...]:
    """The sets of nodes that a network's links lead out of, from the inside out; () where one switch joins all.

    A tree has leaves, and pods of them where more leaves are needed than a spine switch has ports; a pod has as many
    links out as its leaves have into it. A dragonfly has groups.
    """
    ports = ports_of_a_plane(wiring, nics)
    if wiring.kind == "dragonfly":
        group = max(1, wiring.radix // 2 * wiring.down // ports)
        return (Tier(group, ports, wiring.radix // 2 * wiring.up),) if nodes > group else ()
    under = leaf_nodes(wiring, nics)
    if wiring.kind == "rail-only" and nodes <= wiring.radix:
        return ()
    if nodes <= under:
        return ()
    found = [Tier(under, ports, wiring.up)]
    together = nics if wiring.kind == "rail" else 1  # planes whose leaves the same spines join
    leaves = ceil(nodes / under)
    if leaves * together > wiring.radix:
        in_pod = max(1, wiring.radix // 2 // together)
        if leaves > in_pod:
            found.append(Tier(under * in_pod, ports, wiring.up * in_pod))
    return tuple(found)


def bill(wiring: Wiring, nics: int, nodes: int, gbit_s: float) -> Bill:
    """The parts of a network for so many nodes, and what they cost and draw as far as the catalog knows."""
    switches, links = _dragonfly(wiring, nics, nodes) if wiring.kind == "dragonfly" else _tree(wiring, nics, nodes)
    known = switch_for(gbit_s)
    if known is None:
        return Bill(switches, links, None, None, f"no switch of {gbit_s:g} Gbit/s ports is in the catalog")
    wider = wiring.radix / known.ports  # a switch with more ports is taken for several
    usd = None
    if known.usd is not None and known.transceiver_usd is not None:
        usd = switches * known.usd * wider + 2 * links * known.transceiver_usd
    watts = switches * known.watts * wider + 2 * links * known.transceiver_watts
    return Bill(switches, links, usd, watts, f"{known.title}: {known.sources.get('usd', known.sources.get('*', ''))}")


def _tree(wiring: Wiring, nics: int, nodes: int) -> tuple[int, int]:
    """Switches and links of a tree of as many tiers as are needed, over all planes."""
    alike = nics if wiring.kind in ("rail", "rail-only") else 1  # planes
    ports = ports_of_a_plane(wiring, nics)
    joined = wiring.kind != "rail-only"
    if nodes * ports <= wiring.radix and (alike == 1 or not joined):
        return alike, alike * nodes * ports
    leaves = ceil(nodes / leaf_nodes(wiring, nics)) * (alike if joined else 1)
    up = leaves * wiring.up
    switches, links = leaves, up
    if leaves <= wiring.radix:
        switches += ceil(up / wiring.radix)
    else:  # pods of spines, and cores that join them
        switches += ceil(up / (wiring.radix / 2)) + ceil(up / wiring.radix)
        links += up
    times = 1 if joined else alike
    return switches * times, links * times + alike * nodes * ports


def _dragonfly(wiring: Wiring, nics: int, nodes: int) -> tuple[int, int]:
    """Switches and links of a balanced dragonfly: a switch's ports are for a quarter nodes', half its group's, and a
    quarter lead to other groups."""
    switches = ceil(nodes * max(1, nics) / wiring.down)
    in_group = max(1, wiring.radix // 2)
    groups = ceil(switches / in_group)
    local = switches * (min(in_group, switches) - 1) // 2
    far = switches * wiring.up // 2 if groups > 1 else 0
    return switches, nodes * max(1, nics) + local + far


def faults(wiring: Wiring, nics: int, nodes: int) -> Iterator[tuple[str, str]]:
    """Everything that is wrong with a wiring for so many nodes (0: any number): message and help."""
    wrong = []
    if not 4 <= wiring.radix <= MOST_RADIX:
        wrong.append((f"radix={wiring.radix}: a switch has 4 to {MOST_RADIX:,} ports", "radix=64"))
    if not 1 <= wiring.taper <= max(1, wiring.radix - 1):
        message = f"taper={wiring.taper:g} is not between 1 (full bisection) and one port less than a switch has"
        wrong.append((message, "taper=2 halves what leaves a leaf"))
    if wiring.routing not in ROUTINGS[wiring.kind]:
        message = f"routing={wiring.routing} is no way through a {wiring.kind} network"
        wrong.append((message, f"one of {', '.join(ROUTINGS[wiring.kind])}"))
    if wiring.kind == "dragonfly" and wiring.taper != 1:
        wrong.append(("taper= is of trees; a dragonfly has a quarter of its ports between groups", "leave it out"))
    if not 1 <= wiring.connections <= 1024:
        wrong.append((f"qps={wiring.connections} is not between 1 and 1,024", "qps=4"))
    yield from wrong
    most = 0 if wrong else most_nodes(wiring, nics)
    if not wrong and nodes > most:
        more = (
            "more than three tiers of switches" if wiring.kind != "dragonfly" else "more than a dragonfly of switches"
        )
        message = f"{nodes:,} nodes of {nics} ports are {more} of {wiring.radix} ports can join, {most:,}"
        yield message, "a larger radix="


def most_nodes(wiring: Wiring, nics: int) -> int:
    """Nodes that a network of these switches joins: three tiers of a tree, or the groups that links can reach."""
    if wiring.kind == "dragonfly":
        group = wiring.radix // 2
        return (group * wiring.up + 1) * group * wiring.down // max(1, nics)
    planes = max(1, nics) if wiring.kind == "rail" else 1
    return wiring.radix * max(1, wiring.radix // 2) * leaf_nodes(wiring, nics) // planes
