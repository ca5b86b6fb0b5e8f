"""A Timeline from a trace file that Meshwright wrote, in this format or in the one before it.

Format 1 named rank classes by text, and said when steps began and ended in a text of the identity.
"""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.graph import ATTRIBUTES, KIND, QUEUE, RankClass
from meshwright.timeline import Counter, Identity, Instants, MemoryTrace, StepBounds, Timeline
from meshwright.trace.chrome import FORMAT_VERSION

_GZIP = b"\x1f\x8b"
_S = 1e-6
#: What format 1 called a rank class: ``slice 0 rank 1 (h100_sxm)``, ``rank 1 dp0 tp1``.
_NAME = re.compile(r"(?:slice (?P<slice>\d+) )?rank (?P<stage>\d+)(?P<at>(?: [a-z]+\d+)*)(?: \((?P<device>.*)\))?")
_AXIS = re.compile(r"([a-z]+)(\d+)")


class _Version(msgspec.Struct):
    format_version: int


class _Memory(msgspec.Struct):
    time_s: list[float]
    categories: list[str]
    num_bytes: list[list[float]]


class _Steps(msgspec.Struct, frozen=True):
    number: list[int] = []
    begin_s: list[float] = []
    end_s: list[float] = []


class _Counter(msgspec.Struct):
    name: str
    unit: str
    time_s: list[float]
    value: list[float | None]
    rank: int


class _Instants(msgspec.Struct, frozen=True):
    names: list[str] = []
    time_s: list[float] = []
    what: list[int] = []
    rank: list[int] = []


class _Header(msgspec.Struct):
    identity: Identity
    ranks: list[RankClass]
    queues: list[str]
    keys: list[str]
    parts_s: dict[str, list[float]]
    memory: list[_Memory]
    steps: _Steps = _Steps()
    counters: list[_Counter] = []
    instants: _Instants = _Instants()
    records: dict[str, dict[str, list[int | float | str | None]]] = {}


class _Header1(msgspec.Struct):
    identity: dict[str, str]
    ranks: list[str]
    multiplicity: list[int]
    queues: list[str]
    keys: list[str]
    parts_s: dict[str, list[float]]
    memory: list[_Memory]


class _Args(msgspec.Struct):
    span: int
    correlation: int
    kind: str
    key: int
    waited_for: int
    stage: int = -1
    chunk: int = -1
    microbatch: int = -1
    layer: int = -1
    step: int = -1


class _Event(msgspec.Struct):
    ph: str
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"")


class _File(msgspec.Struct):
    meshwright: _Header
    traceEvents: list[_Event]


class _File1(msgspec.Struct):
    meshwright: _Header1
    traceEvents: list[_Event]


def read(path: str | Path) -> Timeline:
    """The timeline that :func:`meshwright.trace.chrome.write` wrote to `path`; times to a float's rounding.

    Raises:
        MeshwrightError: X101 the file cannot be read, or is not gzip or JSON; X102 it is not a trace of Meshwright's;
            X103 its ``format_version`` is another one.
    """
    return decode(_content(path), path)


def decode(data: bytes, path: str | Path = "the trace") -> Timeline:
    """The timeline that :func:`meshwright.trace.chrome.encode` made `data` of; `path` is what errors call it.

    Raises:
        MeshwrightError: as :func:`read`.
    """
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse("X101", f"{path} is not JSON: {error}", "write the trace again: it may be cut off")
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
    except msgspec.ValidationError:
        _refuse("X102", f"{path} is not a trace that Meshwright wrote", "it has no format_version")
    if version not in (1, FORMAT_VERSION):
        _refuse_version(path, version)
    try:
        file = msgspec.json.decode(data, type=_File if version == FORMAT_VERSION else _File1)
        spans = sorted(
            ((msgspec.json.decode(e.args, type=_Args), e) for e in file.traceEvents if e.ph == "X"),
            key=lambda pair: pair[0].span,
        )
        return _timeline(_renewed(file.meshwright, spans) if isinstance(file, _File1) else file.meshwright, spans)
    except (msgspec.ValidationError, msgspec.DecodeError, KeyError, IndexError, ValueError, OverflowError) as error:
        _refuse("X102", f"{path} is damaged, or was changed: {error}", "write the trace again with --trace")


def _content(path: str | Path) -> bytes:
    try:
        data = Path(path).read_bytes()
        return gzip.decompress(data) if data[:2] == _GZIP else data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        _refuse("X101", f"cannot read {path}: {reason}", "name a trace written with --trace")


def _timeline(header: _Header, spans: list[tuple[_Args, _Event]]) -> Timeline:
    _check(header, spans)
    args = [a for a, _ in spans]
    start = np.array([e.ts for _, e in spans], np.float64)
    length = np.array([e.dur for _, e in spans], np.float64)

    def column(values: Any, dtype: type) -> np.ndarray:
        return np.array(list(values), dtype)

    return Timeline(
        ranks=tuple(header.ranks),
        task=column((a.correlation for a in args), np.int32),
        rank=column((e.pid for _, e in spans), np.int32),
        queue=column((QUEUE[header.queues[e.tid]] for _, e in spans), np.int32),
        kind=column((KIND[a.kind] for a in args), np.uint8),
        attributes=np.array([[getattr(a, name) for a in args] for name in ATTRIBUTES], np.int32),
        start_s=start * _S,
        end_s=(start + length) * _S,
        waited_for=column((a.waited_for for a in args), np.int32),
        cost_key=column((a.key for a in args), np.int32),
        keys=tuple(header.keys),
        parts={cause: np.array(seconds, np.float64) for cause, seconds in header.parts_s.items()},
        memory=tuple(
            MemoryTrace(
                time_s=np.array(m.time_s, np.float64),
                categories=tuple(m.categories),
                num_bytes=np.array(m.num_bytes, np.float64).reshape(len(m.categories), len(m.time_s)),
            )
            for m in header.memory
        ),
        steps=StepBounds(
            number=np.array(header.steps.number, np.int64),
            begin_s=np.array(header.steps.begin_s, np.float64),
            end_s=np.array(header.steps.end_s, np.float64),
        ),
        counters=tuple(
            Counter(
                name=c.name,
                unit=c.unit,
                time_s=np.array(c.time_s, np.float64),
                value=np.array(c.value, np.float64),
                rank=c.rank,
            )
            for c in header.counters
        ),
        instants=Instants(
            names=tuple(header.instants.names),
            time_s=np.array(header.instants.time_s, np.float64),
            what=np.array(header.instants.what, np.int32),
            rank=np.array(header.instants.rank, np.int32),
        ),
        records={
            name: {column: _values(values) for column, values in table.items()}
            for name, table in header.records.items()
        },
        identity=header.identity,
    )


def _values(values: list) -> np.ndarray:
    """A column of records: whole numbers, numbers (nothing for what is none) or texts."""
    texts = any(isinstance(value, str) for value in values)
    whole = bool(values) and all(isinstance(value, int) for value in values)
    return np.array(values, object if texts else np.int64 if whole else np.float64)


def _renewed(old: _Header1, spans: list[tuple[_Args, _Event]]) -> _Header:
    """The header of format 1 as one of this format."""
    if len(old.multiplicity) != len(old.ranks):
        raise ValueError("ranks and multiplicity differ in length")
    bounds = [word.partition(":") for word in old.identity.get("step bounds", "").split()]
    numbers = sorted({args.step for args, _ in spans if args.step >= 0})
    known = bounds if len(bounds) == len(numbers) else []
    steps = _Steps(numbers[: len(known)], [float(b) for b, _, _ in known], [float(e) for _, _, e in known])
    return _Header(
        identity=msgspec.convert(old.identity, Identity),
        ranks=[_named(name, count) for name, count in zip(old.ranks, old.multiplicity)],
        queues=old.queues,
        keys=old.keys,
        parts_s=old.parts_s,
        memory=old.memory,
        steps=steps,
    )


def _named(name: str, multiplicity: int) -> RankClass:
    """The rank class that format 1 called by this name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return RankClass(label=name, multiplicity=multiplicity)
    return RankClass(
        slice=int(found["slice"] or -1),
        stage=int(found["stage"]),
        device=found["device"] or "",
        multiplicity=multiplicity,
        at=tuple((axis, int(place)) for axis, place in _AXIS.findall(found["at"])),
    )


def _check(header: _Header, spans: list[tuple[_Args, _Event]]) -> None:
    """Every index points at something.

    Raises:
        ValueError: naming the first that does not.
    """
    limits = {"pid": len(header.ranks), "key": len(header.keys), "waited_for": len(spans), "tid": len(header.queues)}
    tables = {"steps": msgspec.structs.asdict(header.steps), "instants": msgspec.structs.asdict(header.instants)}
    tables["instants"].pop("names")
    tables |= {f"counter {c.name}": {"time_s": c.time_s, "value": c.value} for c in header.counters}
    for name, table in (tables | header.records).items():
        if len({len(column) for column in table.values()}) > 1:
            raise ValueError(f"the columns of {name} differ in length")
    for rank in (*header.instants.rank, *(c.rank for c in header.counters)):
        if not -1 <= rank < len(header.ranks):
            raise ValueError(f"rank {rank} is out of range")
    if any(not 0 <= what < len(header.instants.names) for what in header.instants.what):
        raise ValueError("an instant has no name")
    if any(len(seconds) != len(header.keys) for seconds in header.parts_s.values()):
        raise ValueError("parts_s and keys differ in length")
    for place, (args, event) in enumerate(spans):
        found = {"pid": event.pid, "key": args.key, "waited_for": args.waited_for, "tid": event.tid}
        for name, value in found.items():
            if not (-1 if name == "waited_for" else 0) <= value < limits[name]:
                raise ValueError(f"span {args.span}: {name} {value} is out of range")
        if args.span != place:
            raise ValueError(f"span {place} is missing")


def _refuse_version(path: str | Path, version: int) -> NoReturn:
    if version > FORMAT_VERSION:
        help = "update meshwright, or write the trace again with this version: meshwright predict ... --trace FILE"
    else:
        help = "write the trace again with this version: meshwright predict ... --trace FILE"
    _refuse("X103", f"{path} has format_version {version}; this version reads 1 and {FORMAT_VERSION}", help)


def _refuse(code: str, message: str, help: str) -> NoReturn:
    raise MeshwrightError.one(code, message, help=help)
