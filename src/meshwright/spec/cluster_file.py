"""Reading and writing devices and clusters as TOML: types, keys and units checked, all violations at once."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.spec.cluster_check import findings, limits
from meshwright.spec.cluster_names import Machine
from meshwright.spec.cluster_tree import Cluster, Island
from meshwright.spec.hardware import Device, Efficiency, Level, Node
from meshwright.spec.toml_text import dumps

FORMAT_VERSION = 1

NESTED = {
    (Device, "node"): Node,
    (Device, "levels"): Level,
    (Device, "efficiency"): Efficiency,
    (Machine, "node"): Node,
    (Machine, "levels"): Level,
    (Cluster, "islands"): Island,
    (Cluster, "interconnect"): Level,
    (Island, "levels"): Level,
    (Island, "node"): Node,
}
STANDARD = {(Island, "node"), (Machine, "node"), (Machine, "levels")}
"""Fields that come from the device's standard node and levels when a file does not give them."""


def read(path: Path) -> str:
    """The text of a file; C004 when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MeshwrightError.one("C004", f"cannot read {path}: {reason}") from None


def parse(text: str, place: str) -> dict[str, Any]:
    """The table of a TOML text, its format version checked (C004 not TOML, C012 another version)."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MeshwrightError.one("C004", f"not a TOML file: {error}", place=place) from None
    version = table.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise MeshwrightError.one(
            "C012",
            f"format_version is {version!r}, this version reads {FORMAT_VERSION}",
            place=place,
            help=f"write format_version = {FORMAT_VERSION} at the top of the file",
        )
    return table


class _Reader:
    """Collects violations while tables become records."""

    def __init__(self, place: str, find_device: Callable[[str], Device] | None):
        self.place, self.find_device, self.wrong = place, find_device, []

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
        for name, field in fields.items():
            if name not in table and field.required and (kind, name) not in STANDARD:
                self.report("C006", f"{path}.{name}" if path else name, f"{kind.__name__.lower()} needs {name!r}")
        broken = len(self.wrong) > before
        record = None if broken else kind(**self.with_standards(kind, values))
        for code, where, message, help in limits(values, path) if broken else findings(record, path):
            self.report(code, where, message, help)
        return record

    def with_standards(self, kind: type, values: dict[str, Any]) -> dict[str, Any]:
        """An island's node, and a machine's node and levels, are its device's standard ones unless said."""
        if kind in (Island, Machine):
            values.setdefault("node", values["device"].node)
        if kind is Machine:
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


def device_from(table: dict[str, Any], place: str) -> Device:
    """A device from its table."""
    reader = _Reader(place, None)
    return _finish(reader, reader.record(Device, table, ""))


def is_machine(table: dict[str, Any]) -> bool:
    """Whether a file describes a machine type (a device and what is around it) instead of a cluster's islands."""
    return "device" in table and "islands" not in table


def machine_from(table: dict[str, Any], place: str, find_device: Callable[[str], Device]) -> Machine:
    """A machine type from its table; node and levels it does not give are its device's standard ones."""
    reader = _Reader(place, find_device)
    return _finish(reader, reader.record(Machine, table, ""))


def cluster_from(table: dict[str, Any], place: str, find_device: Callable[[str], Device]) -> Cluster:
    """A cluster from its table; an island without a node has its device's standard one."""
    reader = _Reader(place, find_device)
    return _finish(reader, reader.record(Cluster, table, ""))


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
