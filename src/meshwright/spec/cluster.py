"""The Cluster a user names: from the catalog, from a TOML file, or composed as a short name.

``load("64xh100")`` is 64 devices in that device's standard nodes; ``load("selene")`` a catalog entry;
``load("mine.toml")`` a file. The records are in :mod:`meshwright.spec.hardware` and
:mod:`meshwright.spec.cluster_tree` and are named here too.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec

from meshwright import catalog
from meshwright.errors import Diagnostic, MeshwrightError, a_folder, nearest, remark
from meshwright.spec import cluster_file as file
from meshwright.spec import cluster_names as short
from meshwright.spec.cluster_names import NodeType
from meshwright.spec.cluster_template import commented
from meshwright.spec.cluster_tree import Cluster, Island
from meshwright.spec.hardware import Device, Efficiency, Level, Node, source_of
from meshwright.spec.unused_words import unused

__all__ = [
    "Cluster",
    "Device",
    "Efficiency",
    "Island",
    "Level",
    "NodeType",
    "Node",
    "clusters",
    "devices",
    "from_toml",
    "load",
    "load_device",
    "source_of",
    "to_toml",
]


#: The device that ``meshwright calibrate --here`` measured.
HERE = "here"
#: What else the machine at hand is called by who has no accelerator in it.
AT_HAND = ("cpu", "localhost", "local", "laptop", "thispc")


def load(text: str) -> Cluster:
    """The cluster a text names: a ``.toml`` path, a catalog name, or a short name such as ``64xh100`` or
    ``4x4xa100,25gbe``. Its own name is the text in its usual spelling: ``64xh100`` for ``64 x H100``. Words that
    change nothing are its notes, and remarked.

    Raises:
        MeshwrightError: C001 unknown name, C002 no short name, C003 counts that fill no node, C013 to C015
            words that contradict each other or are unknown and too many devices, C004 to C009 and C012 for what is
            wrong in a file.
    """
    found = read(text)
    for note in found.notes:
        remark(note)
    return found


def read(text: str) -> Cluster:
    """The cluster a text names, as :func:`load` gives it, whose notes are not remarked."""
    text = text.strip()
    if text.lower().endswith(".toml"):
        return from_toml(file.read(Path(text)), place=text)
    if _kind_of(text) or not short.is_short_name(text, _kind_of):
        return _named(text)
    terms, wrong = short.parse(text, _kind_of)
    islands = []
    for term in terms:
        try:
            islands.append(_island(term, text))
        except MeshwrightError as error:
            wrong += error.diagnostics
    if wrong:
        raise a_folder(text, "C004", ".toml") or MeshwrightError(wrong)
    short.bounded(sum(island.num_devices for island in islands), text, "")
    found = short.join(" + ".join(t.text for t in terms), tuple(islands), tuple(t.words for t in terms))
    return msgspec.structs.replace(found, notes=tuple(unused(terms, found)))


def _kind_of(name: str) -> str:
    """Return the kind of a name: ``device``, ``machine``, ``cluster``, or "" for none of them."""
    if _device_file(_plain(name)):
        return "device"
    known = _cluster_names().get(_plain(name))
    if known is None:
        return ""
    return "machine" if file.is_machine(file.parse(_catalog_text("clusters", known), known)) else "cluster"


def _island(term: short.Term, text: str) -> Island:
    """The island of one term of a short name."""
    machine = _machine(term.name)
    if machine is None:
        raise MeshwrightError(_uncountable(term, text))
    link, like = term.words.link, None
    for name in link.machines if link is not None else ():
        other = _machine(name)
        if other.device == machine.device:
            like = (other.title, other.node, other.levels)
    counts = machine.name in _cluster_names().values()
    return short.island_from(term, machine, counts_machines=counts, like=like)


def load_device(name: str) -> Device:
    """The catalog device of that name or alias; case, ``-`` and ``_`` do not matter.

    Raises:
        MeshwrightError: C001 with the nearest names.
    """
    known = _device_file(_plain(name))
    if known is None:
        raise MeshwrightError(_unknown("device", name, ""))
    return _catalog_device(known)


def devices() -> tuple[Device, ...]:
    """Every device of the catalog, sorted by name."""
    return tuple(_catalog_device(name) for name in catalog.names("devices"))


def clusters() -> tuple[Cluster, ...]:
    """Every cluster of the catalog, sorted by name; a machine type is shown as one machine."""
    return tuple(_named(name) for name in catalog.names("clusters"))


def from_toml(text: str, *, place: str = "") -> Cluster:
    """A cluster from the text of a TOML file, validated; `place` is the file's name in error messages.

    Raises:
        MeshwrightError: every violation (C004 to C009, C012).
    """
    found = file.from_text(text, place, load_device)
    return _one_machine(found) if isinstance(found, NodeType) else found


def to_toml(cluster: Cluster) -> str:
    """The TOML text of a cluster; `from_toml` reads it back equal. A catalog device is written by name."""
    return file.cluster_text(cluster, _in_catalog)


def template(cluster: Cluster) -> str:
    """The TOML text of a cluster with a comment on every key; `from_toml` reads it back equal."""
    return commented(cluster, _in_catalog)


def _in_catalog(device: Device) -> bool:
    known = _device_file(_plain(device.name))
    return known is not None and _catalog_device(known) == device


def _named(name: str) -> Cluster:
    known = _cluster_names().get(_plain(name))
    if known is not None:
        return from_toml(_catalog_text("clusters", known), place=f"catalog cluster {known}")
    if _device_file(_plain(name)):
        return load(f"1x{name}")
    raise a_folder(name, "C004", ".toml") or MeshwrightError(_unknown("cluster", name, ""))


@cache
def _catalog_device(name: str) -> Device:
    return file.device_from(file.parse(_catalog_text("devices", name), name), f"catalog device {name}")


def _catalog_text(kind: str, name: str) -> str:
    if kind == "devices" and name == HERE:
        return _measured_device().read_text(encoding="utf-8")
    return catalog.folder(kind).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def _measured_device() -> Path:
    return catalog.measured_here() / "here.toml"


def forget_here() -> None:
    """Read the measured device anew: it was written just now."""
    _device_file.cache_clear()
    _catalog_device.cache_clear()


def _machine(name: str) -> NodeType | None:
    """Return the machine that a term of a short name stands for: a device's standard node or a machine type of the
    catalog; None where it is neither."""
    if _device_file(_plain(name)):
        device = load_device(name)
        return NodeType(name=device.name, device=device, node=device.node, levels=device.levels)
    known = _cluster_names().get(_plain(name))
    if known is None:
        return None
    table = file.parse(_catalog_text("clusters", known), known)
    return file.machine_from(table, f"catalog cluster {known}", load_device) if file.is_machine(table) else None


def _one_machine(machine: NodeType) -> Cluster:
    island = short.island_from(short.Term(name=machine.name, first=1), machine, counts_machines=True)
    island = msgspec.structs.replace(island, name=machine.name)
    return Cluster(name=machine.name, islands=(island,), title=machine.title)


def _uncountable(term: short.Term, text: str) -> Diagnostic:
    place = f"cluster = {text}"
    if _plain(term.name) in _cluster_names():
        message = f"{term.name} is a whole cluster, not a machine to count or join"
        return Diagnostic(
            code="C002", message=message, place=place, help=f"write {term.name} alone, or {short.FORMS[6:]}"
        )
    return _unknown("device or machine", term.name, place)


def _unknown(what: str, name: str, place: str) -> Diagnostic:
    choices = list(_device_names()) if what == "device" else [*_cluster_names(), *_device_names()]
    if _plain(name) == HERE:
        help = "this machine is not measured yet: meshwright calibrate --here --quick"
        return Diagnostic(code="C001", message=f"unknown {what} {name!r}", place=place, help=help)
    if _plain(name) in AT_HAND:
        help = f"this machine is {HERE}, two processes on it 2x{HERE}: meshwright calibrate --here --quick measures it"
        return Diagnostic(code="C001", message=f"unknown {what} {name!r}", place=place, help=help)
    counted = re.fullmatch(r"(\d+)_?([a-z].*)", _plain(name))
    apart = counted and counted[2] in choices  # a count with no x behind it
    help = f"write {counted[1]}x{counted[2]}" if apart else nearest(_plain(name), choices)
    return Diagnostic(code="C001", message=f"unknown {what} {name!r}", place=place, help=help)


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def _device_names() -> dict[str, str]:
    """Every name or alias of a device, plain -> file name."""
    return {alias: name for name in _device_files() for alias in _called(name)}


@cache
def _device_file(plain: str) -> str | None:
    """The file of a device by its plain name or alias. Only files that have the word somewhere are read as TOML."""
    for name in _device_files():
        if plain == _plain(name) or (plain in _plain(_catalog_text("devices", name)) and plain in _called(name)):
            return name
    return None


def _device_files() -> tuple[str, ...]:
    return (*catalog.names("devices"), *((HERE,) if _measured_device().is_file() else ()))


def _called(name: str) -> list[str]:
    """A device's name and aliases, plain."""
    head = file.parse(_catalog_text("devices", name), name)
    return [_plain(alias) for alias in (name, *head.get("aliases", ()))]


@cache
def _cluster_names() -> dict[str, str]:
    """Cluster name, plain -> file name."""
    return {_plain(name): name for name in catalog.names("clusters")}
