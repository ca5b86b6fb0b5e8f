"""Short names of clusters: ``64xh100``, ``4x8xa100``, ``16xa100-40 + 16xh100``, ``8xp5``.

A term is ``COUNTxDEVICE`` (so many devices, in that device's standard nodes), ``NODESxDEVICES_PER_NODExDEVICE``
or ``COUNTxMACHINE`` (so many machines of a catalog type); terms joined by ``+`` are islands. Node and domain
sizes, NICs and the fabric are the data of the device or the machine, never a constant of the code.
"""

from __future__ import annotations

import re
from math import ceil, prod

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec.cluster_tree import Cluster, Island
from meshwright.spec.hardware import Device, Level, Node

TERM = re.compile(r"(?P<first>\d+)\s*x\s*(?:(?P<second>\d+)\s*x\s*)?(?P<name>\w[\w.\-]*)", re.IGNORECASE)
FORMS = "write 64xh100, 4x8xa100 (nodes x devices per node), 8xp5 (machines) or join islands: 8xa100 + 8xh100"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A node type: the device in it, the host around it, and the levels it is built into (arity 0: no limit)."""

    name: str
    device: Device
    node: Node
    levels: tuple[Level, ...]
    title: str = ""

    @property
    def domain_nodes(self) -> int:
        """Nodes of one scale-up domain: 1, or 18 for an NVL72 rack of 4-device trays."""
        return max(1, prod(level.arity for level in self.levels if not level.scale_out) // self.node.devices)


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One island as it was said: `first` devices or machines, or `first` nodes of `second` devices."""

    text: str
    name: str
    first: int
    second: int | None


def parse(text: str) -> tuple[Term, ...]:
    """The terms of a short name.

    Raises:
        MeshwrightError: C002 for every term that is not of the form.
    """
    terms, wrong = [], []
    for part in (part.strip() for part in text.split("+")):
        match = TERM.fullmatch(part)
        if match is None or int(match["first"]) == 0 or match["second"] == "0":
            wrong.append(Diagnostic(code="C002", message=f"cannot read {part!r} in cluster {text!r}", help=FORMS))
            continue
        second = match["second"] and int(match["second"])
        terms.append(Term(text=part, name=match["name"], first=int(match["first"]), second=second or None))
    if wrong:
        raise MeshwrightError(wrong)
    return tuple(terms)


def looks_like_short_name(text: str) -> bool:
    """Whether a text is meant as a short name: it starts with a count, or joins terms."""
    return "+" in text or re.match(r"\s*\d+\s*x", text, re.IGNORECASE) is not None


def island_from(term: Term, machine: Machine, *, counts_machines: bool) -> Island:
    """The island a term asks for, built of `machine`.

    Raises:
        MeshwrightError: C003 when the count does not fill nodes or domains.
    """
    if counts_machines or term.second is not None:
        nodes, per_node = term.first, term.second or machine.node.devices
    else:
        nodes, per_node = _split_count(term, machine)
    domain_nodes = None
    if per_node > machine.node.devices:  # whole scale-up domains were asked for: 2x36xgb200
        nodes, per_node, domain_nodes = _split_domains(term, machine)
    return compose(term, machine, nodes, per_node, domain_nodes or _domain_nodes(term, machine, nodes, per_node))


def _split_count(term: Term, machine: Machine) -> tuple[int, int]:
    size, count = machine.node.devices, term.first
    if count <= size:
        return 1, count
    if count % size:
        below = count - count % size
        halves = [f"{count // d}x{d}x{term.name}" for d in range(size - 1, 1, -1) if count % d == 0][:1]
        unequal = f"{below}x{term.name} + {count - below}x{term.name}"
        raise MeshwrightError.one(
            "C003",
            f"{count} devices do not fill {machine.name} nodes of {size}",
            place=f"cluster = {term.text}",
            help=f"valid: {', '.join(f'{n}x{term.name}' for n in (below, below + size))}; "
            f"or say the node size: {', '.join([*halves, unequal])}",
        )
    return count // size, size


def _split_domains(term: Term, machine: Machine) -> tuple[int, int, int]:
    size, limit = machine.node.devices, machine.node.devices * machine.domain_nodes
    per_domain = term.second
    if per_domain > limit or per_domain % size:
        raise MeshwrightError.one(
            "C003",
            f"{machine.name} has no node or scale-up domain of {per_domain} devices",
            place=f"cluster = {term.text}",
            help=f"a node holds {size}, a scale-up domain up to {limit} in steps of {size}; "
            "describe other machines in a TOML file",
        )
    return term.first * (per_domain // size), size, per_domain // size


def _domain_nodes(term: Term, machine: Machine, nodes: int, per_node: int) -> int:
    """Nodes per scale-up domain, as few equal domains as possible."""
    limit = machine.domain_nodes
    if nodes <= limit:
        return nodes
    best = next(d for d in range(limit, 0, -1) if nodes % d == 0)
    if nodes // best > 2 * ceil(nodes / limit):
        whole = nodes // limit * limit
        raise MeshwrightError.one(
            "C003",
            f"{nodes} nodes of {per_node} {term.name} do not split into equal scale-up domains of up to {limit} nodes",
            place=f"cluster = {term.text}",
            help=f"valid: {whole * per_node}x{term.name}, {(whole + limit) * per_node}x{term.name}; or join islands: "
            f"{whole * per_node}x{term.name} + {(nodes - whole) * per_node}x{term.name}",
        )
    return best


def compose(term: Term, machine: Machine, nodes: int, per_node: int, domain_nodes: int) -> Island:
    """An island of `nodes` nodes with `per_node` devices each, `domain_nodes` of them in one scale-up domain."""
    node = share_of_node(machine.node, per_node)
    levels = _scale_up(machine, per_node * domain_nodes)
    levels += _scale_out(machine, node, nodes // domain_nodes, domain_nodes)
    return Island(name=term.text, device=machine.device, levels=tuple(levels), node=node)


def share_of_node(node: Node, devices: int) -> Node:
    """The standard node cut down to fewer devices: NICs, memory, processors and power in proportion."""
    if devices == node.devices:
        return node
    part = devices / node.devices
    note = f"{devices}/{node.devices} of the standard node"
    return msgspec.structs.replace(
        node,
        devices=devices,
        nics=max(1, round(node.nics * part)),
        host_memory_bytes=round(node.host_memory_bytes * part),
        cpus=round(node.cpus * part),
        nvme_gb_s=node.nvme_gb_s * part,
        nvme_bytes=round(node.nvme_bytes * part),
        power_w=node.power_w * part,
        sources={field: f"{note}; {source}" for field, source in node.sources.items()},
    )


def _scale_up(machine: Machine, devices: int) -> list[Level]:
    """The standard scale-up levels, filled from the inside with so many devices."""
    template = [level for level in machine.levels if not level.scale_out]
    levels, child, standard_child = [], 1, 1
    for i, level in enumerate(template):
        rest, outermost = devices // child, i == len(template) - 1
        arity = level.arity if rest % level.arity == 0 else rest if rest < level.arity or outermost else 1
        if arity > 1:
            gb_s = level.gb_s * child / standard_child  # a child with fewer devices has fewer ports
            shape = torus_shape(arity, len(level.shape)) if level.shape else ()
            levels.append(msgspec.structs.replace(level, arity=arity, gb_s=gb_s, shape=shape))
        child, standard_child = child * arity, standard_child * level.arity
    return levels or [msgspec.structs.replace(template[0], arity=1, shape=(1,) * len(template[0].shape))]


def _scale_out(machine: Machine, node: Node, domains: int, domain_nodes: int) -> list[Level]:
    """The standard scale-out levels over so many domains; one flat level when the tree does not divide."""
    if domains == 1:
        return []
    template = [level for level in machine.levels if level.scale_out]
    inner, last = template[:-1], template[-1]
    sizes, rest = [], domains
    for level in inner:
        arity = min(level.arity, rest)
        if rest % arity:
            gb_s = domain_nodes * node.nic_gb_s
            return [msgspec.structs.replace(last, name="fabric", arity=domains, gb_s=gb_s, busbw_gb_s={})]
        sizes.append((level, arity))
        rest //= arity
    levels, nodes = [], domain_nodes
    for level, arity in [*sizes, (last, rest)]:
        if arity > 1:
            # what was measured was over as many as the description has
            known = level.busbw_gb_s if arity == level.arity else {}
            levels.append(msgspec.structs.replace(level, arity=arity, gb_s=nodes * node.nic_gb_s, busbw_gb_s=known))
        nodes *= arity
    return levels


def torus_shape(devices: int, dims: int) -> tuple[int, ...]:
    """Sides of the most cube-like torus of so many devices: 64 in 3 dims is (4, 4, 4), 32 is (2, 4, 4)."""
    if dims == 1:
        return (devices,)
    root = devices ** (1 / dims)
    side = max(d for d in range(1, round(root) + 1) if devices % d == 0)
    return (side, *torus_shape(devices // side, dims - 1))


def join(text: str, islands: tuple[Island, ...]) -> Cluster:
    """The cluster of the islands a short name asks for; several meet on a network as wide as the narrowest's NICs."""
    if len(islands) == 1:
        return Cluster(name=text, islands=islands)
    outer = [level for island in islands for level in island.levels if level.scale_out]
    outer += [level for island in islands for level in island.device.levels if level.scale_out]
    meeting = Level(
        name="interconnect",
        arity=len(islands),
        gb_s=min(island.num_nodes * island.node.nic_gb_s for island in islands),
        latency_us=max(level.latency_us for level in outer),
        topology="switch",
        scale_out=True,
        sources={"*": "assumed: the islands meet on one network that carries all NICs of the narrowest of them"},
    )
    return Cluster(name=text, islands=islands, interconnect=(meeting,))
