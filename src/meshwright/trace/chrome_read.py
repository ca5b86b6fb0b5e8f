"""A Timeline from a trace file that Meshwright wrote."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.graph import ATTRIBUTES, KIND, QUEUE
from meshwright.timeline import MemoryTrace, Timeline
from meshwright.trace.chrome import FORMAT_VERSION

_GZIP = b"\x1f\x8b"
_S = 1e-6


class _Version(msgspec.Struct):
    format_version: int


class _Memory(msgspec.Struct):
    time_s: list[float]
    categories: list[str]
    num_bytes: list[list[float]]


class _Header(msgspec.Struct):
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


def read(path: str | Path) -> Timeline:
    """The timeline that :func:`meshwright.trace.chrome.write` wrote to `path`; times to a float's rounding.

    Raises:
        MeshwrightError: X101 the file cannot be read, or is not gzip or JSON; X102 it is not a trace of Meshwright's;
            X103 its ``format_version`` is another one.
    """
    data = _content(path)
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse("X101", f"{path} is not JSON: {error}", "write the trace again: it may be cut off")
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
    except msgspec.ValidationError:
        _refuse("X102", f"{path} is not a trace that Meshwright wrote", "it has no format_version")
    if version != FORMAT_VERSION:
        _refuse_version(path, version)
    try:
        file = msgspec.json.decode(data, type=_File)
        spans = sorted(
            ((msgspec.json.decode(e.args, type=_Args), e) for e in file.traceEvents if e.ph == "X"),
            key=lambda pair: pair[0].span,
        )
        return _timeline(file.meshwright, spans)
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
        multiplicity=tuple(header.multiplicity),
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
        identity=header.identity,
    )


def _check(header: _Header, spans: list[tuple[_Args, _Event]]) -> None:
    """Every index points at something.

    Raises:
        ValueError: naming the first that does not.
    """
    limits = {"pid": len(header.ranks), "key": len(header.keys), "waited_for": len(spans), "tid": len(header.queues)}
    if len(header.multiplicity) != len(header.ranks):
        raise ValueError("ranks and multiplicity differ in length")
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
    _refuse("X103", f"{path} has format_version {version}; this version reads {FORMAT_VERSION}", help)


def _refuse(code: str, message: str, help: str) -> NoReturn:
    raise MeshwrightError.one(code, message, help=help)
