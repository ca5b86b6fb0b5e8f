"""Reading and writing devices and clusters as TOML: types, keys and units checked, all violations at once."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec.cluster_check import findings, limits, not_whole_nodes
from meshwright.spec.cluster_names import NodeType
from meshwright.spec.cluster_tree import Cluster, Island
from meshwright.spec.hardware import Device, Efficiency, Level, Near, Node, Optics
from meshwright.spec.toml_text import dumps
from meshwright.spec.wiring import Wiring

FORMAT_VERSION = 1

NESTED = {
    (Device, "node"): Node,
    (Device, "levels"): Level,
    (Device, "efficiency"): Efficiency,
    (Device, "near"): Near,
    (Device, "optics"): Optics,
    (NodeType, "node"): Node,
    (NodeType, "levels"): Level,
    (Cluster, "islands"): Island,
    (Cluster, "interconnect"): Level,
    (Island, "levels"): Level,
    (Island, "node"): Node,
    (Level, "wiring"): Wiring,
}
LEVELS = """[[islands.levels]]
    name = "nvlink"
    arity = 8               # devices of a node
    gb_s = 300              # one device's port, per direction
    latency_us = 0.6
    topology = "switch"
    [[islands.levels]]
    name = "25gbe"
    arity = 4               # nodes
    gb_s = 3.125            # all NICs of one node
    latency_us = 17.8
    topology = "fat_tree"
    scale_out = true        # through the NICs"""
TEMPLATE = "`meshwright catalog clusters 4x4xa100,25gbe --toml > mine.toml` writes a complete file, with comments"
EXAMPLES = {
    Cluster: f"""{TEMPLATE}; the least is
    format_version = 1
    name = "mine"
    [[islands]]
    name = "a100"
    device = "a100"
    {LEVELS}""",
    Island: f"""such as
    [[islands]]
    name = "a100"
    device = "a100"
    {LEVELS}""",
    Level: f"""such as
    {LEVELS}""",
    Node: f"""{TEMPLATE}; such as
    [islands.node]
    devices = 4
    nics = 1
    nic_gbit_s = 25
    host_memory_bytes = 549755813888
    pcie_gb_s = 31.5""",
}
"""Examples of complete tables, by type, for the help where keys are missing."""
STANDARD = {(Island, "node"), (NodeType, "node"), (NodeType, "levels")}
"""Fields that come from the device's standard node and levels when a file does not give them."""


def read(path: Path) -> str:
    """The text of a file; C004 when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        help = "meshwright catalog clusters 4x8xh100,100gbe --toml > mine.toml writes one to change"
        raise MeshwrightError.one("C004", f"cannot read {path}: {reason}", place=str(path), help=help) from None


def parse(text: str, place: str) -> dict[str, Any]:
    """The table of a TOML text, its format version checked (C004 not TOML, C012 another version)."""
    table, wrong = parsed(text, place)
    if wrong:
        raise MeshwrightError(wrong)
    return table


def parsed(text: str, place: str) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The table of a TOML text, and C012 where it names no format version, which is no reason not to read on.

    Raises:
        MeshwrightError: C004 for what is not TOML, C012 for another version, in which keys may mean something else.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are a plain ValueError
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise MeshwrightError.one("C004", f"not a TOML file: {reason}", place=place) from None
    version = table.pop("format_version", None)
    if version == FORMAT_VERSION and not isinstance(version, bool):
        return table, []
    wrong = Diagnostic(
        code="C012",
        message=f"format_version is {version!r}, this version reads {FORMAT_VERSION}",
        place=place,
        help=f"write format_version = {FORMAT_VERSION} at the top of the file",
    )
    if version is not None:
        raise MeshwrightError(wrong)
    return table, [wrong]


class _Reader:
    """Collects violations while tables become records."""

    def __init__(self, place: str, find_device: Callable[[str], Device] | None):
        self.place, self.find_device, self.wrong = place, find_device, []
        self.shown: set[str] = set()

    def report(self, code: str, path: str, message: str, help: str = "") -> None:
        place = f"{path}   <- {self.place}" if self.place else path
        self.wrong.append(Diagnostic(code=code, message=message, place=place, help=help))

    def record(self, kind: type, table: Any, path: str) -> Any:
        """A record of that kind, or None with the violations reported."""
        if not isinstance(table, dict):
            self.report("C007", path, f"expected a table, got {type(table).__name__}")
            return None
        fields = {f.name: f for f in msgspec.structs.fields(kind)}
        before, values = len(self.wrong), {}
        for key, value in table.items():
            where = f"{path}.{key}" if path else key
            if key not in fields:
                self.report("C005", where, f"unknown key {key!r}", nearest(key, list(fields)))
            else:
                values[key] = self.value(kind, fields[key], value, where)
        self.needs(kind, fields, table, path)
        broken = len(self.wrong) > before
        record = None if broken else kind(**self.with_standards(kind, values))
        for code, where, message, help in limits(values, path) if broken else findings(record, path):
            self.report(code, where, message, help)
        if broken and kind is Island:
            self.fits(table, values, path)
        return record

    def needs(self, kind: type, fields: dict[str, Any], table: dict[str, Any], path: str) -> None:
        """C006 that names every key a table lacks, with an example of such a table."""
        lacking = [n for n, f in fields.items() if n not in table and f.required and (kind, n) not in STANDARD]
        if not lacking:
            return
        named = " and ".join([", ".join(map(repr, lacking[:-1])), repr(lacking[-1])][len(lacking) == 1 :])
        example = EXAMPLES.get(kind, "")
        if example in self.shown or (kind in (Level, Island, Cluster) and LEVELS in self.shown):
            example = "as in the example above"
        self.shown |= {example, *([LEVELS] if kind in (Level, Island, Cluster) else [])}
        self.report("C006", path or "the file", f"{kind.__name__.lower()} needs {named}", example)

    def fits(self, table: dict[str, Any], values: dict[str, Any], path: str) -> None:
        """C009 for an island with other faults whose levels already cannot be whole nodes."""
        levels, node, device = table.get("levels"), table.get("node"), values.get("device")
        rows = [row for row in levels if isinstance(row, dict)] if isinstance(levels, list) else []
        size = node.get("devices") if isinstance(node, dict) else device.node.devices if device else None
        arities = [row.get("arity") for row in rows if not row.get("scale_out")]
        if not rows or not all(type(n) is int and n > 0 for n in (size, *arities)):
            return
        if prod(arities) % size and len(arities) < len(rows):
            self.report("C009", f"{path}.node.devices = {size}", *not_whole_nodes(prod(arities), size))

    def with_standards(self, kind: type, values: dict[str, Any]) -> dict[str, Any]:
        """An island's node, and a machine's node and levels, are its device's standard ones unless said."""
        if kind in (Island, NodeType):
            values.setdefault("node", values["device"].node)
        if kind is NodeType:
            values.setdefault("levels", values["device"].levels)
        return values

    def value(self, kind: type, field: Any, value: Any, path: str) -> Any:
        if field.name == "device" and isinstance(value, str):
            return self.device(value, path)
        if field.name == "device":
            return self.record(Device, value, path)
        nested = NESTED.get((kind, field.name))
        if nested is None:
            return self.plain(field.type, value, path)
        if field.name in ("levels", "islands", "interconnect"):
            rows = value if isinstance(value, list) else [value]
            return tuple(self.record(nested, row, f"{path}[{i}]") for i, row in enumerate(rows))
        return self.record(nested, value, path)

    def plain(self, wanted: Any, value: Any, path: str) -> Any:
        if _too_large(value):
            self.report(
                "C008", path, "a number of more digits than anything has", "check the unit that the key ends in"
            )
            return None
        try:
            return msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            choices = get_args(wanted) if get_origin(wanted) is Literal else ()
            self.report("C007", f"{path} = {value!r}", str(error), f"one of: {', '.join(choices)}" if choices else "")
            return None

    def device(self, name: str, path: str) -> Device | None:
        try:
            return self.find_device(name)
        except MeshwrightError as error:
            for found in error.diagnostics:
                self.report(found.code, f"{path} = {name}", found.message, found.help)
            return None


def _too_large(value: Any) -> bool:
    """Whether a value is, or holds, a whole number beyond 64 bits."""
    if isinstance(value, int):
        return abs(value) >= 2**63
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_too_large(part) for part in inside)


def device_from(table: dict[str, Any], place: str) -> Device:
    """A device from its table."""
    reader = _Reader(place, None)
    return _finish(reader, reader.record(Device, table, ""))


def is_machine(table: dict[str, Any]) -> bool:
    """Whether a file describes a machine type (a device and what is around it) instead of a cluster's islands."""
    return "device" in table and "islands" not in table


def machine_from(table: dict[str, Any], place: str, find_device: Callable[[str], Device]) -> NodeType:
    """A machine type from its table; node and levels it does not give are its device's standard ones."""
    reader = _Reader(place, find_device)
    return _finish(reader, reader.record(NodeType, table, ""))


def from_text(text: str, place: str, find_device: Callable[[str], Device]) -> NodeType | Cluster:
    """The machine type or the cluster that a TOML text describes."""
    table, wrong = parsed(text, place)
    reader = _Reader(place, find_device)
    reader.wrong += wrong
    return _finish(reader, reader.record(NodeType if is_machine(table) else Cluster, table, ""))


def _finish(reader: _Reader, record: Any) -> Any:
    if reader.wrong:
        raise MeshwrightError(reader.wrong)
    return record


def cluster_text(cluster: Cluster, in_catalog: Callable[[Device], bool]) -> str:
    """The TOML text of a cluster; a device for which `in_catalog` holds is written by name."""
    table = msgspec.to_builtins(cluster)
    for row, island in zip(table["islands"], cluster.islands):
        if in_catalog(island.device):
            row["device"] = island.device.name
        if island.node == island.device.node:
            del row["node"]
    return dumps({"format_version": FORMAT_VERSION, **table})
