"""Timelines as Chrome trace files, which Perfetto and the viewers of PyTorch's Kineto open, and back.

One process a rank class, one thread a queue; every span is a complete event ("X") with ``ts`` and ``dur`` in
microseconds; arrows follow a send from the task that made it to the task it let start; memory and other counters are
counters ("C"), instants are instants ("i"). Requests that were served are asynchronous events ("b", "e") of their
replica: waiting, prompt and answer below one another. What concerns no one rank has a process of its own, behind the
others. What viewers do not need but a Timeline has (cost keys, parts, records) is in the entry ``meshwright``.
Format: Trace Event Format (Google, 2016); categories and arguments as Kineto writes them.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwright.atomic import write_bytes
from meshwright.graph import ATTRIBUTES, KIND, KINDS, QUEUES
from meshwright.timeline import Timeline

FORMAT_VERSION = 2
#: The version of the trace schema that Kineto writes.
SCHEMA_VERSION = 1
#: Event category by kind of task; kernels where nothing else is said.
CATEGORIES = {"host": "cpu_op", "copy": "gpu_memcpy"}
#: Served requests that are drawn; the records of all are in the entry ``meshwright``.
MOST_REQUESTS = 5000
_US = 1e6


def write(timeline: Timeline, path: str | Path) -> None:
    """Write `timeline` to `path`, whole or not at all; compressed when the name ends with ``.gz``.

    Equal timelines give equal bytes.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    data = encode(timeline)
    if str(path).endswith(".gz"):
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_bytes(path, data)


def encode(timeline: Timeline) -> bytes:
    """The content of a trace file."""
    return msgspec.json.encode(
        {
            "schemaVersion": SCHEMA_VERSION,
            "format_version": FORMAT_VERSION,
            "displayTimeUnit": "ms",
            "deviceProperties": [],
            "meshwright": header(timeline),
            "traceEvents": list(events(timeline)),
        }
    )


def header(timeline: Timeline) -> dict[str, Any]:
    """Return all of a Timeline but its spans, as plain values."""
    return {
        "identity": timeline.identity.said(),
        "ranks": msgspec.to_builtins(timeline.ranks),
        "queues": list(QUEUES),
        "keys": list(timeline.keys),
        "parts_s": {cause: seconds.tolist() for cause, seconds in timeline.parts.items()},
        "memory": [
            {"time_s": m.time_s.tolist(), "categories": list(m.categories), "num_bytes": m.num_bytes.tolist()}
            for m in timeline.memory
        ],
        "steps": _columns(timeline.steps),
        "counters": [_columns(counter) for counter in timeline.counters],
        "instants": _columns(timeline.instants),
        "records": {
            name: {column: values.tolist() for column, values in table.items()}
            for name, table in timeline.records.items()
        },
    }


def _columns(record: msgspec.Struct) -> dict[str, Any]:
    """The fields of a record of columns, arrays as lists."""
    fields = msgspec.structs.asdict(record)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Every trace event: names, spans, arrows, counters."""
    yield from _names(timeline)
    yield from _spans(timeline)
    yield from _arrows(timeline)
    yield from _counters(timeline)
    yield from _instants(timeline)
    yield from _requests(timeline)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    def say(name: str, rank: int, queue: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": rank, "tid": queue, "ts": 0, "args": args}

    for rank, known in enumerate(timeline.ranks):
        count = known.multiplicity
        yield say("process_name", rank, 0, {"name": known.name})
        yield say("process_labels", rank, 0, {"labels": f"{count:,} rank{'' if count == 1 else 's'}"})
        yield say("process_sort_index", rank, 0, {"sort_index": rank})
        for queue in np.unique(timeline.queue[timeline.rank == rank]).tolist():
            yield say("thread_name", rank, queue, {"name": QUEUES[queue]})
            yield say("thread_sort_index", rank, queue, {"sort_index": queue})
    if (timeline.instants.rank < 0).any() or any(counter.rank < 0 for counter in timeline.counters):
        yield say("process_name", len(timeline.ranks), 0, {"name": "all ranks"})
        yield say("process_sort_index", len(timeline.ranks), 0, {"sort_index": len(timeline.ranks)})


def _spans(timeline: Timeline) -> Iterator[dict[str, Any]]:
    names = timeline.names()
    ts, dur = timeline.start_s * _US, (timeline.end_s - timeline.start_s) * _US
    columns = (timeline.rank, timeline.queue, timeline.kind, timeline.task, timeline.cost_key, timeline.waited_for)
    attributes = timeline.attributes.T.tolist()
    parts = _parts_by_key(timeline)
    rows = zip(*(c.tolist() for c in columns), ts.tolist(), dur.tolist(), strict=True)
    for i, (rank, queue, kind, task, key, waited, start, length) in enumerate(rows):
        args: dict[str, Any] = {
            "span": i,
            "device": rank,
            "stream": queue,
            "correlation": task,
            "kind": KINDS[kind],
            "cost_key": timeline.keys[key],
            "key": key,
            "waited_for": waited,
            **{name: value for name, value in zip(ATTRIBUTES, attributes[i]) if value >= 0},
        }
        if waited >= 0:
            args["waited_for_task"] = names[waited]
        if parts[key]:
            args["parts_us"] = parts[key]
        cat = CATEGORIES.get(KINDS[kind], "kernel")
        name = timeline.keys[key] if KINDS[kind] == "op" else names[i]
        yield {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": rank,
            "tid": queue,
            "ts": start,
            "dur": length,
            "args": args,
        }


def _parts_by_key(timeline: Timeline) -> list[dict[str, float]]:
    """Per cost key its causes in microseconds, without those that take no time."""
    return [
        {cause: float(seconds[key]) * _US for cause, seconds in timeline.parts.items() if seconds[key]}
        for key in range(len(timeline.keys))
    ]


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """A flow for every send: from the task whose result it carries, through it, to the tasks it let start."""
    released: dict[int, list[int]] = {}
    sends = timeline.kind == KIND["send"]
    for i in np.flatnonzero(timeline.waited_for >= 0).tolist():
        cause = int(timeline.waited_for[i])
        if sends[cause] and not sends[i]:
            released.setdefault(cause, []).append(i)
    for send in np.flatnonzero(sends).tolist():
        maker = int(timeline.waited_for[send])
        path = [maker, send] if maker >= 0 and not sends[maker] else [send]
        yield from _arrow(timeline, send, [*path, *released.get(send, ())])


def _arrow(timeline: Timeline, number: int, path: list[int]) -> Iterator[dict[str, Any]]:
    for place, span in enumerate(path if len(path) > 1 else ()):
        event = {
            "ph": "s" if place == 0 else "f" if place == len(path) - 1 else "t",
            "id": number,
            "cat": "send",
            "name": "send",
            "pid": int(timeline.rank[span]),
            "tid": int(timeline.queue[span]),
            "ts": float(timeline.start_s[span]) * _US,
        }
        yield event | ({} if place == 0 else {"bp": "e"})


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, memory in enumerate(timeline.memory):
        for at, column in zip((memory.time_s * _US).tolist(), memory.num_bytes.T.tolist()):
            held = dict(zip(memory.categories, column))
            yield {"ph": "C", "name": "memory (bytes)", "pid": rank, "ts": at, "args": held}
    for counter in timeline.counters:
        name, where = (
            f"{counter.name} ({counter.unit})" if counter.unit else counter.name,
            _process(timeline, counter.rank),
        )
        for at, value in zip((counter.time_s * _US).tolist(), counter.value.tolist()):
            yield {"ph": "C", "name": name, "pid": where, "ts": at, "args": {counter.name: value}}


def _instants(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """An instant of one rank class is drawn in its process, one of all ranks through all of them."""
    found = timeline.instants
    for at, what, rank in zip((found.time_s * _US).tolist(), found.what.tolist(), found.rank.tolist()):
        place = {"pid": _process(timeline, rank), "tid": 0, "s": "p" if rank >= 0 else "g"}
        yield {"ph": "i", "name": found.names[what], "cat": "instant", "ts": at, **place}


def _process(timeline: Timeline, rank: int) -> int:
    return rank if rank >= 0 else len(timeline.ranks)


def _requests(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The first :data:`MOST_REQUESTS` served requests, each from its arrival to its last token."""
    table = timeline.records.get("requests", {})
    if not {"replica", "arrival_s", "scheduled_s", "first_s", "end_s"} <= table.keys():
        return
    first = {name: column[:MOST_REQUESTS].tolist() for name, column in table.items()}
    for i, where in enumerate(first["replica"]):
        said = {name: column[i] for name, column in first.items()}
        times = [said[name] * _US for name in ("arrival_s", "scheduled_s", "first_s", "end_s")]
        event = {"cat": "request", "id": i, "pid": where, "tid": 0}
        yield event | {"ph": "b", "name": f"request {i}", "ts": times[0], "args": said}
        for name, begin, end in zip(("waiting", "prompt", "answer"), times, times[1:]):
            yield event | {"ph": "b", "name": name, "ts": begin}
            yield event | {"ph": "e", "name": name, "ts": end}
        yield event | {"ph": "e", "name": f"request {i}", "ts": times[3]}
