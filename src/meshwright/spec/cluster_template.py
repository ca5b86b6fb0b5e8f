"""The commented TOML of a cluster: every key with its meaning and unit, keys left out shown as comments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from meshwright.spec.cluster_file import FORMAT_VERSION
from meshwright.spec.cluster_tree import Cluster, Island
from meshwright.spec.hardware import Device, Level, Node
from meshwright.spec.toml_text import dumps

HEAD = """# A cluster of Meshwright: change what differs on yours, then say `--on THIS_FILE.toml`.
# Ranks are counted island by island, the innermost level first. A number's source is in the table `sources` beside it
# ("*" for all that are not named): say there where yours are from. `meshwright explain toml` and `explain level` teach
# the words; a file with something missing or in another unit is refused with everything that is wrong.
"""
#: What a key of a record means, in the words of `meshwright explain`.
MEANING: dict[type, dict[str, str]] = {
    Cluster: {
        "format_version": "of this kind of file",
        "name": "what answers call it",
        "title": "one line on what it is",
        "pue": "power of the site over power of the machines",
        "price_usd_hour": "US dollars for the whole cluster an hour; without it the devices' prices add up",
        "mtbf_hours": "hours between interruptions of a job on all of it; without it from the devices",
        "power_limit_w": "watts the site can deliver to devices and hosts; without it no limit",
    },
    Island: {
        "name": "what answers call these devices",
        "device": "of the catalog (meshwright catalog devices), or a table [islands.device] with its own numbers",
    },
    Level: {
        "name": "what joins the children here; the network profile is found by it",
        "arity": "children under one parent: devices, then nodes, then groups of nodes",
        "gb_s": "one child's port, per direction, in 1e9 bytes/s; a node's is all its NICs: nics * nic_gbit_s / 8",
        "latency_us": "one hop, one way, microseconds",
        "topology": "switch, fat_tree (any to any), mesh (all pairs), ring, torus, pcie (one host bridge), dragonfly",
        "oversubscription": "each child gets gb_s over this when all send at once; 2 for a 2:1 taper",
        "in_network_reduction": "the switches can add up (NVLink SHARP, InfiniBand SHARP)",
        "scale_out": "leaves the node through its NICs",
        "shared_ports": "exchanges under way at once share a child's port",
        "shape": "sides of a torus; they multiply to arity",
        "busbw_gb_s": "busbw of nccl-tests at 256 MiB over all devices under a level between nodes",
        "wiring": "switches between nodes: kind, radix, taper, routing, connections, sharp",
    },
    Node: {
        "devices": "devices of one host",
        "nics": "network ports of one host that devices use",
        "nic_gbit_s": "one port, per direction, in 1e9 bits/s",
        "host_memory_bytes": "bytes: 549_755_813_888 is 512 GiB",
        "pcie_gb_s": "host to device, one device, per direction, in 1e9 bytes/s: PCIe 4 x16 is 31.5",
        "cpus": "processor cores",
        "nvme_gb_s": "sequential read of all local drives together, in 1e9 bytes/s",
        "nvme_bytes": "capacity of the local drives",
        "power_w": "what the host draws under load besides its devices",
        "copy_gb_s": "measured copies between one device and host memory; 0: 82% of pcie_gb_s",
        "host_memory_gb_s": "peak of the host's memory, all sockets; 0: 409.6 is assumed",
        "host_tflops": "peak of the host's processors in products, 1e12 operations/s; 0: 0.08 for each of cpus",
        "nvme_write_gb_s": "sequential write of all local drives together; 0: as fast as they are read",
        "root_port_gb_s": "one PCIe root port of the host, both directions together; 0: all that its devices carry",
        "root_port_devices": "devices behind the root port that has most of them",
        "numa_nodes": "parts of the host's memory, each near to some of its devices: its sockets, as a rule",
        "direct_gb_s": "what devices reach of one network port past the host's memory, per direction; 0: all of it",
    },
}
#: The record a table's last name means.
KINDS: dict[str, type] = {"": Cluster, "islands": Island, "levels": Level, "interconnect": Level, "node": Node}
#: What an optional key could be, where its default says nothing.
SHOWN = {
    "title": '"our rack"',
    "busbw_gb_s": "{ all_reduce = 1.5 }",
    "price_usd_hour": "50.0",
    "mtbf_hours": "1000.0",
    "power_limit_w": "100000.0",
    "shape": "[2, 2]",
    "wiring": '{ kind = "rail-only", radix = 64 }',
}


def commented(cluster: Cluster, in_catalog: Callable[[Device], bool]) -> str:
    """The TOML text of a cluster with comments; a device for which `in_catalog` holds is written by name."""
    table = msgspec.to_builtins(cluster)
    for row, island in zip(table["islands"], cluster.islands):
        row["node"] = msgspec.to_builtins(island.node)
        if in_catalog(island.device):
            row["device"] = island.device.name
    lines = dumps({"format_version": FORMAT_VERSION, **table}).splitlines()
    return HEAD + "\n" + "\n".join(_commented(lines)) + "\n"


def _commented(lines: list[str]) -> Iterator[str]:
    """Every line with what its key means, and behind the last key of a table those that could be there too."""
    kind: type | None = Cluster
    said: set[str] = set()
    for line in [*lines, "[]"]:
        if line.startswith("["):
            yield from _optional(kind, said)
            kind, said = _kind_of(line), set()
            if line == "[]":
                return
            yield line
            continue
        key = line.partition(" =")[0]
        meaning = MEANING.get(kind, {}).get(key) if kind is not None else None
        if meaning is None:
            yield from [line] if line else []
            continue
        said.add(key)
        yield f"{line}  # {meaning}"


def _kind_of(header: str) -> type | None:
    """The record of a table by its header; None for tables of sources and of a device's own numbers."""
    path = header.strip("[]").split(".")
    return None if "device" in path[:-1] or path[-1] not in KINDS else KINDS[path[-1]]


def _optional(kind: type | None, said: set[str]) -> Iterator[str]:
    if kind is not None:
        defaults: Mapping[str, Any] = {f.name: f.default for f in msgspec.structs.fields(kind)}
        for key, meaning in MEANING[kind].items():
            if key not in said and key in defaults:
                value = SHOWN.get(key) or str(defaults[key]).lower()
                yield f"# {key} = {value}  # {meaning}"
    yield ""
