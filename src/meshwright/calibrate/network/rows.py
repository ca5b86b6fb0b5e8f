"""Rows of ``collectives.csv`` as collectives of this package: which group of ranks on which levels a row measured.

A row names a device, counts and a network in words; the catalog's clusters say what that network is. A network
the source does not state is taken to be the device's standard one, under a name no profile answers to.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from math import inf
from pathlib import Path
from typing import NamedTuple

from meshwright.calibrate.tables import Faults, find
from meshwright.errors import MeshwrightError
from meshwright.spec import cluster
from meshwright.spec.hardware import Device, Level
from meshwright.work import Group, Hop

#: Words of a row's network or source, and the cluster of the catalog whose levels they mean.
CLUSTERS = (
    ("p4de", "2xp4de"),
    ("p5.48xlarge", "2xp5"),
    ("HDR IB 8x200", "2xndv4"),
    ("A3 Ultra", "8xa3-ultra"),
    ("Slingshot", "perlmutter"),
    ("perlmutter", "perlmutter"),
    ("NDR IB 400 Gb/s per node (1 GPU", "vista"),
    ("Omni-Path", "jean-zay"),
)
#: Known faults of the measured machine; predicted, never fitted.
FLAGS = ("suspect_slow_network", "slow_or_unstated_fabric")
OPS = {"send_recv": "send"}
COLUMNS = ("source", "hardware", "nodes", "gpus", "gpus_per_node", "network", "op", "library", "variant", "bytes")
UNSTATED = "unstated"
#: Bytes a second that no port of a device carries: more is a unit mixed up.
FASTEST = 4e13


class Series(NamedTuple):
    """Measurements of one collective over sizes: bytes as nccl-tests counts them, and seconds."""

    source: str
    hardware: str
    op: str
    library: str
    eager: bool
    device: Device
    group: Group
    flag: str
    num_bytes: list[float]
    seconds: list[float]

    @property
    def held_by(self) -> tuple[str, str, str, int]:
        """The whole group of rows that a holdout takes or leaves."""
        return self.source, self.hardware, self.op, self.group.size


def library_of(row: dict[str, str]) -> tuple[str, bool]:
    """``nccl`` or the serving engine whose kernel it is, and whether it ran outside a CUDA graph."""
    name = row["library"].split("-custom")[0].split()[0].lower()
    return name, "eager" in row["variant"]


def group_of(row: dict[str, str]) -> tuple[Group, Device]:
    """The ranks a row measured, as levels, and their device.

    Raises:
        MeshwrightError: C001 for a device the catalog does not know.
    """
    device = cluster.load_device(row["hardware"])
    gpus, per_node = int(row["gpus"]), int(row["gpus_per_node"])
    levels, node_devices, nics = _levels(row, device, per_node)
    return _group(levels, gpus, per_node, node_devices, nics), device


def _levels(row: dict[str, str], device: Device, per_node: int) -> tuple[tuple[Level, ...], int, int]:
    """The levels a row's ranks lie on, devices of a node and its NICs."""
    words = f"{row['network']} {row['source']}"
    for word, name in CLUSTERS:
        if word in words:
            island = cluster.load(name).islands[0]
            outside = tuple(level for level in island.levels if level.scale_out)
            if island.device.scale_up == device.scale_up:
                inside = tuple(level for level in island.levels if not level.scale_out)
                return (*inside, *outside), island.node.devices, island.node.nics
            inside = tuple(level for level in device.levels if not level.scale_out)
            return (*inside, *outside), per_node, island.node.nics
    return device.levels, device.node.devices, device.node.nics


def _group(levels: tuple[Level, ...], gpus: int, per_node: int, node_devices: int, nics: int) -> Group:
    domain = 1
    for level in levels:
        domain *= 1 if level.scale_out else level.arity or 1
    inside = gpus if gpus <= domain and domain > node_devices else per_node
    hops, below = [], 1
    for level in levels:
        members = -(-gpus // below) if level.scale_out else min(level.arity, -(-inside // below))
        if members <= 1:
            continue
        hops.append(_hop(level, members, below, min(1.0, max(below / node_devices, 1 / nics))))
        below *= members
        if level.scale_out:
            break
    return Group(size=gpus, hops=tuple(hops))


def _hop(level: Level, members: int, below: int, nic_share: float) -> Hop:
    gb_s = level.busy_gb_s
    if level.scale_out:
        gb_s *= nic_share  # ranks use the NICs next to them, one at least
    elif level.topology == "mesh":
        gb_s *= (members - 1) / (level.arity - 1)  # links to absent peers carry nothing
    return Hop(
        name=level.name,
        members=members,
        gb_s=gb_s,
        latency_us=level.latency_us,
        below=below,
        topology=level.topology,
        reduces=level.in_network_reduction and not level.scale_out,
        scale_out=level.scale_out,
    )


def read_series(data_dir: Path) -> list[Series]:
    """Every series of ``collectives.csv`` (or ``.csv.gz``) of a folder, in the order they first appear.

    Raises:
        MeshwrightError: N002 no such table, N003 columns missing or rows that cannot be, all of them.
    """
    path = find(data_dir, "collectives")
    if path is None:
        raise MeshwrightError.one("N002", f"no collectives.csv or collectives.csv.gz in {data_dir}")
    found: dict[tuple, Series] = {}
    for _, row, num_bytes, seconds in checked(path):
        library, eager = library_of(row)
        key = (*(row[c] for c in COLUMNS[:8]), eager, row.get("flag", ""))
        series = found.get(key)
        if series is None:
            group, device = group_of(row)
            if "not stated" in row["network"]:
                group = unstated(group)
            op = OPS.get(row["op"], row["op"])
            head = (row["source"], row["hardware"], op, library, eager, device, group, row.get("flag", ""))
            series = found[key] = Series(*head, [], [])
        series.num_bytes.append(num_bytes)
        series.seconds.append(seconds)
    return list(found.values())


def unstated(group: Group) -> Group:
    hops = tuple(h if not h.scale_out else Hop(**{**_fields(h), "name": UNSTATED}) for h in group.hops)
    return Group(size=group.size, hops=hops)


def _fields(hop: Hop) -> dict:
    return {name: getattr(hop, name) for name in Hop.__struct_fields__}


def checked(path: Path) -> list[tuple[int, dict[str, str], float, float]]:
    """Every row of the table: its line, its cells, bytes and seconds.

    Raises:
        MeshwrightError: N003 columns missing or rows that cannot be, all of them.
    """
    rows, wrong = [], Faults(path)
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            table = csv.DictReader(file)
            missing = [c for c in (*COLUMNS, "latency_us") if c not in (table.fieldnames or ())]
            if missing:
                raise MeshwrightError.one("N003", f"columns missing: {', '.join(missing)}", place=f"{path}:1")
            for row in table:
                why, num_bytes, seconds = numbers(row)
                if why:
                    wrong.add("N003", table.line_num, why)
                else:
                    rows.append((table.line_num, row, num_bytes, seconds))
    except (OSError, UnicodeDecodeError, csv.Error, EOFError, zlib.error) as error:
        raise MeshwrightError.one("N002", f"cannot read the table: {error}", place=str(path)) from None
    wrong.refuse()
    return rows


def numbers(row: dict[str, str]) -> tuple[str, float, float]:
    """Why a row cannot be, "" if it can; bytes and seconds."""
    try:
        num_bytes, seconds = float(row["bytes"]), float(row["latency_us"]) * 1e-6
        nodes, gpus, per_node = int(row["nodes"]), int(row["gpus"]), int(row["gpus_per_node"])
    except ValueError as error:
        return str(error), 0.0, 0.0
    if not (0 < num_bytes < inf and 0 < seconds < inf):
        return f"bytes {row['bytes']} in {row['latency_us']} us", 0.0, 0.0
    if gpus < 2 or nodes * per_node < gpus:
        return f"{gpus} ranks on {nodes} nodes of {per_node}", 0.0, 0.0
    if num_bytes / seconds > FASTEST:
        return f"{num_bytes:g} bytes in {row['latency_us']} us is {num_bytes / seconds / 1e9:.0f} GB/s", 0.0, 0.0
    return "", num_bytes, seconds
