"""Short names of clusters: ``64xh100``, ``4x8xa100``, ``16xa100-40 + 16xh100``, ``8xp5``, ``4x4xa100,25gbe``.

A term is ``COUNTxDEVICE`` (so many devices, in that device's standard nodes), ``NODESxDEVICES_PER_NODExDEVICE``
or ``COUNTxMACHINE`` (so many machines of a catalog type), with words for what the nodes and the network are
(:mod:`meshwright.spec.cluster_words`); terms joined by ``+`` are islands. Node and domain sizes, NICs and the fabric
are the data of the device or the machine, never a constant of the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import ceil, prod

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.spec import cluster_words
from meshwright.spec.cluster_levels import Standard, delayed, on
from meshwright.spec.cluster_tree import MOST_DEVICES, Cluster, Island
from meshwright.spec.cluster_words import Words, bad
from meshwright.spec.hardware import Device, Level, Node
from meshwright.spec.links import LinkKind, named
from meshwright.spec.wiring import faults

NAME = r"(?P<name>[A-Za-z0-9_][\w.\-]*)"
TERM = re.compile(rf"(?P<first>\d+)\s*x\s*(?:(?P<second>\d+)\s*x\s*)?{NAME}", re.ASCII)
#: ``8h100`` and ``4x8 h100`` are meant as ``8xh100`` and ``4x8xh100``, where the name is one.
LOOSE = re.compile(
    rf"(?P<first>\d+)(?:\s*x\s*|\s+|(?=[a-z]))(?:(?P<second>\d+)(?:\s*x\s*|\s+|(?=[a-z])))?{NAME}", re.ASCII
)
#: ``h100x8``: the name first.
REVERSED = re.compile(rf"{NAME}\s*x\s*(?P<first>\d+)", re.ASCII)
FORMS = "write 64xh100, 4x8xa100 (nodes x devices per node), 8xp5 (machines) or join islands: 8xa100 + 8xh100; "
FORMS += "words for the network follow: 4x4xa100,25gbe; meshwright explain cluster"
#: Other signs for times: multiplication signs, an asterisk, a cyrillic letter that looks like x.
TIMES = str.maketrans(dict.fromkeys("×✕✖⨯*хХX", "x"))
#: How the source of a network begins that nobody said.
ASSUMED = "assumed, no network is said"
#: Memory and drives of a host, which its own cores have whole.
OF_HOST = ("host_memory_bytes", "host_memory_gb_s", "host_tflops", "nvme_gb_s", "nvme_write_gb_s", "nvme_bytes")
#: Digits of a count that are read; with more it is far beyond any cluster, whatever they are.
READ_DIGITS = 12


class NodeType(msgspec.Struct, frozen=True, kw_only=True):
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
    """One island as it was said: `first` devices or machines, or `first` nodes of `second` devices, and the words."""

    name: str
    first: int
    second: int | None = None
    words: Words = Words()

    @property
    def text(self) -> str:
        """The island in its usual spelling, which :func:`parse` takes."""
        counts = f"{self.first}x" + (f"{self.second}x" if self.second else "")
        return f"{counts}{self.name}{self.words.text()}"


def plain(text: str) -> str:
    """A text with usual signs for times, in small letters."""
    return text.translate(TIMES).lower().strip()


#: What a name is: ``device``, ``machine``, ``cluster``, or "" for none of them.
Kind = Callable[[str], str]


def parse(text: str, kind_of: Kind) -> tuple[list[Term], list[Diagnostic]]:
    """The terms of a short name as far as they can be read, and everything that is wrong with how they are said: C002
    for a term that is not of the form, C013 and C014 for its words."""
    terms, wrong = [], []
    for part in (part.strip() for part in text.split("+")):
        term, found = _term(part, text, kind_of)
        terms += [term] if term is not None else []
        wrong += found
    return terms, wrong


def _term(part: str, text: str, kind_of: Kind) -> tuple[Term | None, list[Diagnostic]]:
    """One island, and everything that is wrong with how it is said; of words that contradict each other the first
    holds."""
    items = [item.strip() for item in part.split(",")]
    head = _head(items[0], kind_of)
    if (head is None and not is_worded(items[0])) or (head is not None and 0 in head):
        return None, [Diagnostic(code="C002", message=f"cannot read {part!r} in cluster {text!r}", help=FORMS)]
    words, wrong = cluster_words.read(items if head is None else items[1:], part)
    name, first, second = head or (words.device, None, None)
    if words.device and words.device != name:
        wrong.append(bad("C013", f"{name} and device={words.device} contradict each other", part, "keep one of them"))
    if not name:
        return None, [*wrong, bad("C014", "no device is named", part, "add device=a100; meshwright catalog devices")]
    term, found = _counted(name, first, second, words, part, machines=kind_of(name) == "machine")
    return term, wrong + found


def _head(item: str, kind_of: Kind) -> tuple[str, int | None, int | None] | None:
    """(name, first, second) of ``4x8xa100`` or ``a100x8``; a name alone has no count. None: it is not of the form."""
    said = plain(item)
    if said and kind_of(said):
        return said, None, None
    match = TERM.fullmatch(said)
    if match is None:
        match = LOOSE.fullmatch(said)
        match = match if match is not None and kind_of(match["name"]) else None
    if match is not None:
        return match["name"], _count(match["first"]), _count(match["second"]) if match["second"] else None
    match = REVERSED.fullmatch(said)
    for name in (match["name"], f"{match['name']}x") if match is not None else ():
        if kind_of(name):
            return name, _count(match["first"]), None
    return None


def _count(digits: str) -> int:
    return int(digits) if len(digits) <= READ_DIGITS else 10**READ_DIGITS


def is_worded(text: str) -> bool:
    """Whether a text is meant as words for an island: it has a key that one takes."""
    key, equals, _ = (piece.strip() for piece in plain(text).partition("="))
    return bool(equals) and key in (*cluster_words.KEYS, *cluster_words.ALIASES)


def _counted(
    name: str, first: int | None, second: int | None, words: Words, part: str, *, machines: bool
) -> tuple[Term, list[Diagnostic]]:
    """The term of a count and of nodes= and gpus=, which may say the same again but nothing else."""
    wrong, nodes, gpus = [], words.nodes, words.gpus
    if first is None:
        first, second = nodes or 1, gpus
    elif second is not None or machines:
        second = second or gpus
        for key, value, other in (("nodes", first, nodes), ("gpus", second, gpus)):
            if other is not None and other != value:
                message = f"{key}={other} contradicts {part.partition(',')[0]}, which says {value}"
                wrong.append(bad("C013", message, part, f"say {key} once"))
    elif nodes or gpus:
        total = first
        nodes, gpus = nodes or total // gpus, gpus or total // nodes
        if nodes * gpus != total:
            said = " and ".join(f"{k}={v}" for k, v in (("nodes", words.nodes), ("gpus", words.gpus)) if v)
            ways = [f"{total // n}x{n}x{name}" for n in (8, 4, 2, 1) if total % n == 0][:2]
            wrong.append(bad("C013", f"{total} devices are not {said}", part, f"such as {' or '.join(ways)}"))
        first, second = nodes or 1, gpus or 1
    words = msgspec.structs.replace(words, nodes=None, gpus=None, device="")
    return Term(name=name, first=first, second=second, words=words), wrong


def is_short_name(text: str, kind_of: Kind) -> bool:
    """Whether a text is meant as a short name: it counts, joins terms or says words."""
    return any(sign in text for sign in "+,=") or text[:1].isdigit() or _head(text, kind_of) is not None


#: A machine of the catalog that has the network a word names: its name, node and levels.
Like = tuple[str, Node, tuple[Level, ...]]


def island_from(term: Term, machine: NodeType, *, counts_machines: bool, like: Like | None = None) -> Island:
    """The island a term asks for, built of `machine`, with the network of `like` where a word means that machine's.

    Raises:
        MeshwrightError: C003 when the count does not fill nodes or domains; C013 for words the device has no part in;
            C015 when it is more than any cluster.
    """
    if counts_machines or term.second is not None:
        nodes, per_node = term.first, term.second or machine.node.devices
    else:
        nodes, per_node = _split_count(term, machine)
    bounded(nodes * per_node, term.text, term.name)
    domain_nodes = None
    if per_node > machine.node.devices:  # whole scale-up domains were asked for: 2x36xgb200
        nodes, per_node, domain_nodes = _split_domains(term, machine)
    node = share_of_node(machine.node, per_node, whole=machine.device.synchronous)
    levels, wrong = machine.levels, []
    if term.words != Words():
        standard = Standard(machine.name, machine.device.scale_up, node, levels, like)
        node, levels, wrong = on(term.words, standard, per_node, term.text)
    if levels[0].name == "pcie" != machine.levels[0].name:  # nothing but NICs joins nodes any more
        if domain_nodes is not None:
            message = f"{per_node * domain_nodes} devices of {domain_nodes} nodes are joined by NVLink alone"
            wrong.append(bad("C013", message, term.text, f"drop {term.words.inside}, or say {per_node} devices a node"))
        domain_nodes = 1
    if wrong:
        raise MeshwrightError(wrong)
    if not counts_machines and term.words.link is None:
        levels = tuple(_assumed(level, term) if level.scale_out else level for level in levels)
    machine = msgspec.structs.replace(machine, device=term.words.device_of(machine.device))
    island = compose(term, machine, nodes, node, levels, domain_nodes or _domain_nodes(term, machine, nodes, per_node))
    wrong = [bad("C013", message, term.text, help) for message, help in wiring_faults(island)]
    if wrong:
        raise MeshwrightError(wrong)
    return island


def wiring_faults(island: Island) -> Iterator[tuple[str, str]]:
    """Faults of the switches between an island's nodes, each with a help."""
    for level in island.levels:
        if level.wiring is not None:
            under = prod(inner.arity for inner in island.levels[: island.levels.index(level)])
            nics = max(1, island.node.nics * under // max(1, island.node.devices))
            yield from faults(level.wiring, nics, level.arity)


def bounded(devices: int, text: str, name: str) -> None:
    """C015 for more devices than any cluster has, said of `text`; `name` is the device's, for the help."""
    if devices > MOST_DEVICES:
        message = f"{devices:,} devices are more than {MOST_DEVICES:,}"
        help = f"the largest that is answered for is {MOST_DEVICES}x{name}" if name else "take fewer devices"
        raise MeshwrightError(bad("C015", message, text, f"{help}; the largest clusters there are have some 200,000"))


def _assumed(level: Level, term: Term) -> Level:
    """A standard level between nodes, which nobody said that this cluster has."""
    source = level.sources.get("gb_s", level.sources.get("*", ""))
    source = f"{ASSUMED}, say one such as {term.text},25gbe: {source}"
    return msgspec.structs.replace(level, sources={**level.sources, "gb_s": source})


def _split_count(term: Term, machine: NodeType) -> tuple[int, int]:
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


def _split_domains(term: Term, machine: NodeType) -> tuple[int, int, int]:
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


def _domain_nodes(term: Term, machine: NodeType, nodes: int, per_node: int) -> int:
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


def compose(
    term: Term, machine: NodeType, nodes: int, node: Node, levels: tuple[Level, ...], domain_nodes: int
) -> Island:
    """An island of `nodes` nodes, built into `levels`, `domain_nodes` of them in one scale-up domain."""
    tree = scale_up(levels, node.devices * domain_nodes)
    tree += _scale_out(levels, node, nodes // domain_nodes, domain_nodes)
    return Island(name=term.text, device=machine.device, levels=tuple(tree), node=node)


def share_of_node(node: Node, devices: int, *, whole: bool = False) -> Node:
    """The standard node cut down to fewer devices: NICs, memory, processors and power in proportion; the host's memory
    and drives `whole` where the devices are its own cores."""
    if devices == node.devices:
        return node
    part = devices / node.devices
    note = f"{devices}/{node.devices} of the standard node"
    own = {name: getattr(node, name) for name in OF_HOST} if whole else {}
    cut = msgspec.structs.replace(
        node,
        devices=devices,
        nics=max(1, round(node.nics * part)),
        host_memory_bytes=round(node.host_memory_bytes * part),
        cpus=round(node.cpus * part),
        host_memory_gb_s=node.host_memory_gb_s * part,
        host_tflops=node.host_tflops * part,
        nvme_gb_s=node.nvme_gb_s * part,
        nvme_write_gb_s=node.nvme_write_gb_s * part,
        nvme_bytes=round(node.nvme_bytes * part),
        power_w=node.power_w * part,
        root_port_devices=min(node.root_port_devices, devices),
        sources={field: f"{note}; {source}" for field, source in node.sources.items()},
    )
    return msgspec.structs.replace(cut, **own)


def scale_up(levels: tuple[Level, ...], devices: int) -> list[Level]:
    """The standard scale-up levels, filled from the inside with so many devices."""
    template = [level for level in levels if not level.scale_out]
    found, child, standard_child = [], 1, 1
    for i, level in enumerate(template):
        rest, outermost = devices // child, i == len(template) - 1
        arity = level.arity if rest % level.arity == 0 else rest if rest < level.arity or outermost else 1
        if arity > 1:
            gb_s = level.gb_s * child / standard_child  # a child with fewer devices has fewer ports
            shape = torus_shape(arity, len(level.shape)) if level.shape else ()
            found.append(msgspec.structs.replace(level, arity=arity, gb_s=gb_s, shape=shape))
        child, standard_child = child * arity, standard_child * level.arity
    return found or [msgspec.structs.replace(template[0], arity=1, shape=(1,) * len(template[0].shape))]


def _scale_out(standard: tuple[Level, ...], node: Node, domains: int, domain_nodes: int) -> list[Level]:
    """The standard scale-out levels over so many domains; one flat level when the tree does not divide."""
    if domains == 1:
        return []
    template = [level for level in standard if level.scale_out]
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


def _meeting(link: LinkKind, islands: tuple[Island, ...]) -> Level:
    """The network on which islands meet, as it was said: a port of a node, or as many as a node has, by its kind."""
    ports = [island.num_nodes * (1 if link.per == "node" else max(1, island.node.nics)) for island in islands]
    each = "one port" if link.per == "node" else "as many ports as its network has"
    return Level(
        name=link.name,
        arity=len(islands),
        gb_s=min(ports) * link.port_gb_s,
        latency_us=link.latency_us,
        topology=link.topology,
        scale_out=True,
        sources={
            "gb_s": f"said: meet={link.name}; {link.source('gbit_s')}; assumed: {each} of every node",
            "latency_us": link.source("latency_us"),
            "*": f"said: meet={link.name}",
        },
    )


def join(text: str, islands: tuple[Island, ...], words: tuple[Words, ...] = ()) -> Cluster:
    """The cluster of the islands a short name asks for, and what each says of its network; several meet on the network
    that is said, else on one as wide as the narrowest's NICs.

    Raises:
        MeshwrightError: C013 for several networks to meet on, or one where there is nothing to meet.
    """
    meets = list(dict.fromkeys(one.meet for one in words if one.meet))
    if len(meets) > 1 or (meets and len(islands) == 1):
        of_one = f"meet={meets[0]}: there is no other island to meet"
        message = of_one if len(islands) == 1 else f"meet={' and meet='.join(meets)}: islands meet on one network"
        help = "drop it, or join islands by +" if len(islands) == 1 else "say one of them, once"
        raise MeshwrightError(bad("C013", message, text, help))
    if len(islands) == 1:
        return Cluster(name=text, islands=islands)
    longest_s = max((said.delay_s or 0.0 for said in words), default=0.0)
    if meets:
        meeting = delayed(_meeting(named(meets[0]), islands), longest_s)
        return Cluster(name=text, islands=islands, interconnect=(meeting,))
    links = [said.link for said in words] or [None] * len(islands)
    delays = [said.delay_s or 0.0 for said in words] or [0.0] * len(islands)
    outer = []
    for island, link, delay_s in zip(islands, links, delays):
        outer += [level.latency_us - delay_s * 1e6 for level in island.levels if level.scale_out]
        outer += [level.latency_us for level in island.device.levels if level.scale_out] if link is None else []
        outer += [link.latency_us] if link is not None else []
    ports = [island.num_nodes * island.node.nic_gb_s for island in islands]
    narrowest = links[ports.index(min(ports))]
    source = "assumed: the islands meet on one network that carries all NICs of the narrowest of them"
    meeting = Level(
        name=narrowest.name if narrowest is not None else "interconnect",
        arity=len(islands),
        gb_s=min(ports),
        latency_us=max(outer),
        topology="switch",
        scale_out=True,
        sources={"*": source + (f", which is {narrowest.title}" if narrowest is not None else "")},
    )
    return Cluster(name=text, islands=islands, interconnect=(delayed(meeting, longest_s),))
