"""A cluster from a machine's own tools; figures that they do not give are the catalog's, and marked as assumed."""

from __future__ import annotations

import re
from collections import Counter
from math import prod

import msgspec

from meshwright import catalog
from meshwright.detect import accelerators, host
from meshwright.detect.accelerators import Gpu, Matrix
from meshwright.detect.ask import Here, MachineAnswer
from meshwright.detect.host import Port
from meshwright.errors import MeshwrightError, nearest
from meshwright.spec.cluster import Cluster, Device, Island, Level, Node, load_device, source_of
from meshwright.spec.cluster_check import limits
from meshwright.spec.cluster_names import scale_up, share_of_node
from meshwright.spec.cluster_tree import MOST_DEVICES
from meshwright.spec.links import LinkKind, links, networks

#: Share by which a device's memory may differ from the catalog's before it is written as the machine's own.
MEMORY_DIFFERS = 0.02
#: Lanes that a PCIe slot has.
LANES = (1, 2, 4, 8, 16, 32)
VENDORS = re.compile(r"^(NVIDIA|AMD|Advanced Micro Devices, Inc\.)\s+", re.IGNORECASE)


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a machine: records, each with the tool that told, and every answer that came or did not."""

    gpus: tuple[Gpu, ...]
    told_gpus: str
    matrix: Matrix | None
    told_matrix: str
    ports: tuple[Port, ...]
    told_ports: str
    cores: int
    memory_bytes: int
    drive_bytes: int
    asked: tuple[MachineAnswer, ...]


class Detected(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster, and the commands that were asked to find it."""

    cluster: Cluster
    asked: tuple[MachineAnswer, ...]


def detect(here: Here, *, nodes: int = 1, device: str = "") -> Detected:
    """The cluster of `nodes` machines like the one that is asked; `device` names its accelerators where they are not
    known by what drivers call them.

    Raises:
        MeshwrightError: C016 where no accelerator is found, C017 where they are unlike or unknown.
    """
    facts = ask(here)
    if not facts.gpus:
        raise MeshwrightError.one(
            "C016",
            "no accelerator was found on this machine",
            place="asked: "
            + "; ".join(
                f"{a.asked}: {a.missing or 'names none'}" for a in facts.asked if not a.asked.startswith("/proc")
            ),
            help="run it on a machine with accelerators, or say the cluster in words (--on 4x4xa100,25gbe; meshwright "
            "explain cluster); for this machine's processor: meshwright calibrate --here, then --on here",
        )
    found = _with_memory(_device(facts, device), facts)
    return Detected(cluster=_cluster(found, facts, nodes), asked=facts.asked)


def ask(here: Here) -> MachineFacts:
    """Ask everything that may tell; no tool is needed as long as one names accelerators."""
    asked: list[MachineAnswer] = []

    def said(answer: MachineAnswer) -> str:
        asked.append(answer)
        return answer.text

    query = ("nvidia-smi", "--query-gpu=" + ",".join(accelerators.QUERY), "--format=csv,noheader,nounits")
    gpus, told, matrix, matrix_told = (
        accelerators.nvidia_gpus(said(here.run(*query))),
        "nvidia-smi --query-gpu",
        None,
        "",
    )
    if gpus:
        matrix, matrix_told = (
            accelerators.nvidia_matrix(said(here.run("nvidia-smi", "topo", "-m"))),
            "nvidia-smi topo -m",
        )
    else:
        text = said(here.run("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"))
        gpus, told = accelerators.amd_gpus(text), "rocm-smi --showproductname"
        if gpus:
            text = said(here.run("rocm-smi", "--showtopotype"))
            matrix, matrix_told = accelerators.amd_matrix(text), "rocm-smi --showtopotype"
        else:
            gpus, told = accelerators.lspci_gpus(said(here.run("lspci"))), "lspci"
            gpus = tuple(gpu for gpu in gpus if known_device(gpu.name)) or gpus  # a processor's own graphics is none
    ports, told_ports = _ports(here, asked)
    drives = [name for name in here.names("/sys/block") if re.fullmatch(r"nvme\d+n\d+", name)]
    return MachineFacts(
        gpus=gpus,
        told_gpus=told,
        matrix=matrix if matrix is not None and len(matrix.links) == len(gpus) else None,
        told_matrix=matrix_told,
        ports=ports,
        told_ports=told_ports,
        cores=host.cores(said(here.read("/proc/cpuinfo"))),
        memory_bytes=host.memory_bytes(said(here.read("/proc/meminfo"))),
        drive_bytes=sum(host.drive_bytes(here.read(f"/sys/block/{name}/size").text) for name in drives),
        asked=tuple(asked),
    )


def _ports(here: Here, asked: list[MachineAnswer]) -> tuple[tuple[Port, ...], str]:
    """Ports that are up, RDMA before plain Ethernet, and who told."""
    answer = here.run("ibstat")
    asked.append(answer)
    ports = host.ibstat_ports(answer.text)
    if ports:
        return ports, "ibstat"
    folder, found = "/sys/class/infiniband", []
    for card in here.names(folder):
        for port in here.names(f"{folder}/{card}/ports"):
            at = f"{folder}/{card}/ports/{port}"
            found += host.sysfs_port(card, *(here.read(f"{at}/{f}").text for f in ("state", "rate", "link_layer")))
    asked.append(
        MachineAnswer(folder, text="\n".join(p.name for p in found), missing="" if found else "no port is active")
    )
    if found:
        return tuple(found), folder
    folder = "/sys/class/net"
    for name in here.names(folder):
        if "device" in here.names(f"{folder}/{name}"):  # else it is no card: a bridge, a bond, the loopback
            found += host.ethernet_port(name, *(here.read(f"{folder}/{name}/{f}").text for f in ("operstate", "speed")))
    asked.append(
        MachineAnswer(folder, text="\n".join(p.name for p in found), missing="" if found else "no speed is told")
    )
    return tuple(found), folder


def known_device(name: str) -> str:
    """The catalog's device that a driver calls so; "" where it is not known."""
    plain = VENDORS.sub("", name.strip()).lower()
    for device, row in catalog.tables("reported").items():
        if plain in (known.lower() for known in row["names"]):
            return device
    return ""


def _device(facts: MachineFacts, said: str) -> Device:
    if said:
        return load_device(said)
    found = Counter(known_device(gpu.name) or gpu.name for gpu in facts.gpus)
    names = ", ".join(f"{count} x {name}" for name, count in found.items())
    place = f"{facts.told_gpus}: {names}"
    if len(found) > 1:
        message = "the accelerators of this machine are unlike, and a node holds one kind"
        help = "say which is meant with --device; CUDA_VISIBLE_DEVICES does not change what nvidia-smi shows"
        raise MeshwrightError.one("C017", message, place=place, help=help)
    (name,) = found
    if name not in catalog.tables("reported"):
        near = nearest(VENDORS.sub("", name), [*catalog.names("devices")])
        help = f"say which device of the catalog it is like: --device h100; {near}"
        raise MeshwrightError.one("C017", f"{name!r} is not a device of the catalog", place=place, help=help)
    return load_device(name)


def _with_memory(device: Device, facts: MachineFacts) -> Device:
    """The device with the memory that its driver tells, where that is not what the catalog says."""
    sizes = {g.memory_bytes for g in facts.gpus if g.memory_bytes and _plausible("memory_bytes", g.memory_bytes)}
    if not sizes or abs(min(sizes) / device.memory_bytes - 1) < MEMORY_DIFFERS:
        return device
    sources = {**device.sources, "memory_bytes": f"{facts.told_gpus}: {min(sizes):,} bytes"}
    return msgspec.structs.replace(device, memory_bytes=min(sizes), sources=sources)


def _cluster(device: Device, facts: MachineFacts, nodes: int) -> Cluster:
    count = len(facts.gpus)
    if nodes * count > MOST_DEVICES:
        message = f"{nodes:,} machines of {count} are more than {MOST_DEVICES:,} devices"
        raise MeshwrightError.one("C015", message, place=f"--nodes {nodes}", help=f"at most {MOST_DEVICES // count:,}")
    node = _node(device, facts)
    inner, node = _inside(device, facts, node)
    link, ports = _network(facts)
    node, outer = _outside(device, facts, node, link, ports, nodes)
    name = f"{nodes}x{count}x{device.name}"
    island = Island(name=name, device=device, levels=(*inner, *outer), node=node)
    return Cluster(name=name, islands=(island,), title=f"detected: {nodes} x {count} {device.title}")


def _node(device: Device, facts: MachineFacts) -> Node:
    """Return the host: the device's standard node with the figures that the machine tells."""
    count, standard = len(facts.gpus), device.node
    if count == standard.devices:
        node = standard
    else:
        node = share_of_node(standard, count)
    sources = {field: _assumed(device, source) for field, source in node.sources.items()}
    sources["devices"] = f"{facts.told_gpus}: {count} accelerators"
    told = {
        "cpus": (facts.cores, "/proc/cpuinfo"),
        "host_memory_bytes": (facts.memory_bytes, "/proc/meminfo: MemTotal"),
        "nvme_bytes": (facts.drive_bytes, "/sys/block/nvme*/size"),
    }
    told = {field: (value, source) for field, (value, source) in told.items() if value and _plausible(field, value)}
    values = {field: value for field, (value, _) in told.items()}
    sources |= {field: source for field, (_, source) in told.items()}
    if "nvme_bytes" not in told:
        values |= {"nvme_bytes": 0, "nvme_gb_s": 0.0}
        sources |= dict.fromkeys(("nvme_bytes", "nvme_gb_s"), "/sys/block: no NVMe drive")
    return msgspec.structs.replace(node, **values, sources=sources)


def _plausible(field: str, value: float) -> bool:
    """Whether a number is one that a cluster file takes; a tool that says another is not believed."""
    return not any(limits({field: value}, ""))


def _assumed(device: Device, source: str) -> str:
    return f"assumed, not detected; {device.name} of the catalog: {source}"


def _level_assumed(level: Level, device: Device) -> Level:
    sources = {field: _assumed(device, source) for field, source in level.sources.items()}
    return msgspec.structs.replace(level, sources=sources)


def _inside(device: Device, facts: MachineFacts, node: Node) -> tuple[tuple[Level, ...], Node]:
    """The levels that join the devices of a node, and the node with the host link that was told."""
    count = len(facts.gpus)
    slot, told = _slot(facts)
    if slot:
        sources = {**node.sources, "pcie_gb_s": told}
        node = msgspec.structs.replace(node, pcie_gb_s=slot, sources=sources)
    first = device.levels[0]
    if facts.matrix is None or count == 1:
        levels = scale_up(device.levels, count)
        if prod(level.arity for level in levels) != count:  # more than the standard node holds
            levels = [_sized(first, count)]
        return tuple(_level_assumed(level, device) for level in levels), node
    kind = "NV" if any(cell.startswith("NV") for row in facts.matrix.links for cell in row) else "XGMI"
    group = _joined(facts.matrix, kind)
    if group > 1 and not first.name.startswith(("nvlink", "xgmi")):
        group = 1  # links of which the catalog has no rate: PCIe stands in, and its source names them
    if group == count:
        return (_joined_level(first, facts, count, device),), node
    pcie = _pcie(node, count // group, facts, group)
    if group == 1:
        return (pcie,), node
    widths = sorted({cell for row in facts.matrix.links for cell in row if cell.startswith(kind)})
    said = f"{facts.told_matrix}: {' and '.join(widths)} within groups of {group}"
    return (_told(_sized(first, group), f"{said}; rate of the catalog: {source_of(first, 'gb_s')}"), pcie), node


def _joined(matrix: Matrix, kind: str) -> int:
    """Size of the groups within which every pair is joined by such links, where all groups are of one size; else 1,
    and the number of devices where they are joined only through one another."""
    count = len(matrix.links)
    near = [{j for j in range(count) if i == j or matrix.links[i][j].startswith(kind)} for i in range(count)]
    if all(near[j] == near[i] for i in range(count) for j in near[i]) and len({len(group) for group in near}) == 1:
        return len(near[0])
    reached, grown = {0}, set(near[0])
    while grown != reached:
        reached, grown = grown, set().union(*(near[i] for i in grown))
    return count if len(reached) == count else 1


def _joined_level(level: Level, facts: MachineFacts, count: int, device: Device) -> Level:
    """NVLink or XGMI between all devices of a node; switches where each pair shows all the links that a device has."""
    widths = sorted({cell for i, row in enumerate(facts.matrix.links) for j, cell in enumerate(row) if i != j})
    said = f"{facts.told_matrix}: {' and '.join(widths)} between pairs of {count}"
    rate = f"{said}; rate of the catalog: {source_of(level, 'gb_s')}"
    one = links().get(device.scale_up)
    alike = re.fullmatch(r"NV(\d{1,3})", widths[0]) if len(widths) == 1 else None
    if one is None or alike is None or count == 2:
        return _told(_sized(level, count), rate)
    pair_gb_s = int(alike[1]) * one.gb_s
    if pair_gb_s >= 0.99 * level.gb_s:
        return _told(msgspec.structs.replace(_sized(level, count), topology="switch"), rate)
    said += f": {alike[1]} links to each of {count - 1}, no switch; {one.gb_s:g} GB/s a link"
    gb_s = min(level.gb_s, pair_gb_s * (count - 1))
    mesh = msgspec.structs.replace(_sized(level, count), gb_s=gb_s, topology="mesh", in_network_reduction=False)
    return _told(mesh, said)


def _sized(level: Level, arity: int) -> Level:
    return msgspec.structs.replace(level, arity=arity, shape=())


def _told(level: Level, source: str) -> Level:
    return msgspec.structs.replace(
        level, sources={**level.sources, "gb_s": source, "arity": source, "topology": source}
    )


def _slot(facts: MachineFacts) -> tuple[float, str]:
    """GB/s of a device's slot by its generation and lanes; 0 where nobody tells."""
    gpu = facts.gpus[0]
    link = links().get(f"pcie{gpu.pcie_generation}")
    if link is None or gpu.pcie_lanes not in LANES:
        return 0.0, ""
    told = f"{facts.told_gpus}: PCIe generation {gpu.pcie_generation}, {gpu.pcie_lanes} lanes; {link.source('gb_s')}"
    return link.gb_s * gpu.pcie_lanes / 16, told


def _pcie(node: Node, arity: int, facts: MachineFacts, below: int) -> Level:
    """Devices, or groups of `below` devices, joined by the host's PCIe alone."""
    link = links()["pcie4"]
    cells = {cell for row in facts.matrix.links for cell in row} - {"X", "0"}
    said = f"{facts.told_matrix}: {', '.join(sorted(cells)) or 'no direct link'}; {node.sources.get('pcie_gb_s', '')}"
    return Level(
        name="pcie",
        arity=arity,
        gb_s=node.pcie_gb_s * max(1, below),
        latency_us=link.latency_us,
        topology="pcie",
        sources={"*": said, "latency_us": link.source("latency_us")},
    )


def _network(facts: MachineFacts) -> tuple[LinkKind | None, list[Port]]:
    """The network between machines: the ports that are the accelerators' own where that is told, else the fastest; and
    the catalog's link of that rate or the next below."""
    ports = [p for p in facts.ports if _plausible("nic_gbit_s", p.gbit_s)]
    near = [p for p in ports if facts.matrix is not None and p.name in facts.matrix.near]
    best = max((p.gbit_s for p in near or ports), default=0.0)
    ports = [p for p in near or ports if p.gbit_s == best]
    if not ports:
        return None, []
    kind = ports[0].kind
    named = {"infiniband": "ib", "roce": "roce", "ethernet": "gbe", "efa": "efa"}[kind]
    alike = [link for link in networks() if re.sub(r"\d", "", link.name) == named]
    at_most = [link for link in alike if link.gbit_s <= best * 1.05]
    return max(at_most, key=lambda one: one.gbit_s, default=alike[0]), ports


def _outside(
    device: Device, facts: MachineFacts, node: Node, link: LinkKind | None, ports: list[Port], nodes: int
) -> tuple[Node, tuple[Level, ...]]:
    """The node's NICs, and the level between nodes where there are several."""
    if link is None:
        outer = [_level_assumed(level, device) for level in device.levels if level.scale_out][-1:]
        level = msgspec.structs.replace(outer[0], name="fabric", arity=nodes, gb_s=node.nic_gb_s) if outer else None
        return node, (level,) if nodes > 1 and level is not None else ()
    rate, of = ports[0].gbit_s, ", ".join(port.name for port in ports)
    told = f"{facts.told_ports}: {len(ports)} x {rate:g} Gbit/s {ports[0].kind} ({of})"
    sources = {**node.sources, "nics": told, "nic_gbit_s": told}
    node = msgspec.structs.replace(node, nics=len(ports), nic_gbit_s=rate, sources=sources)
    if nodes == 1:
        return node, ()
    flat = "assumed, not detected: a network that carries all ports of all nodes at once"
    return node, (
        Level(
            name=link.name,
            arity=nodes,
            gb_s=node.nic_gb_s,
            latency_us=link.latency_us,
            topology=link.topology,
            scale_out=True,
            sources={
                "arity": "said: --nodes",
                "gb_s": told,
                "latency_us": f"{link.title}: {link.source('latency_us')}",
                "*": flat,
            },
        ),
    )
