"""A timeline as the HTML report carries it: lanes of spans sorted by start, columns as compressed typed arrays.

A lane is one queue of one rank class. Times are 32-bit ticks of the makespan, so a step of ten seconds keeps
2.3 ns. Beyond :data:`MAX_SPANS` only the first and last microbatches of each rank are kept, and the payload says so.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.answer.prediction import RankMemory
from meshwright.graph import ATTRIBUTES, KINDS, QUEUES
from meshwright.report.palette import KINDS as KIND_COLOURS
from meshwright.report.palette import QUEUES as QUEUE_COLOURS
from meshwright.report.palette import cause_colour
from meshwright.timeline import MemoryTrace, Timeline

MAX_SPANS = 200_000
MAX_MEMORY_POINTS = 2_000
_LAST_TICK = 2**32 - 1


def payload(timeline: Timeline, *, max_spans: int = MAX_SPANS) -> dict[str, Any]:
    """Return a timeline as ``timeline.js`` draws it, in plain JSON values: columns of at most `max_spans` spans."""
    chosen, note = _kept(timeline, max_spans)
    order = chosen[np.lexsort((timeline.start_s[chosen], timeline.queue[chosen], timeline.rank[chosen]))]
    new_index = np.full(timeline.num_spans, -2, np.int64)
    new_index[order] = np.arange(len(order))
    waited = timeline.waited_for[order]
    causes = list(timeline.parts)
    on_path = np.zeros(timeline.num_spans, np.uint8)
    on_path[timeline.critical_path()] = 1
    span_s = timeline.makespan_s or 1.0
    attributes = {name: _column(timeline.attributes[i][order], "i4") for i, name in enumerate(ATTRIBUTES)}
    return {
        "seconds": span_s,
        "count": len(order),
        "note": note,
        "ranks": [rank.name for rank in timeline.ranks],
        "multiplicity": [int(m) for m in timeline.multiplicity],
        "lanes": _lanes(timeline, order),
        "queueColours": [QUEUE_COLOURS.get(queue, "") for queue in QUEUES],
        "queues": list(QUEUES),
        "kinds": list(KINDS),
        "kindColours": [KIND_COLOURS.get(kind, "") for kind in KINDS],
        "keys": list(timeline.keys),
        "causes": causes,
        "causeColours": [cause_colour(cause) for cause in causes],
        "parts": _column(np.concatenate([timeline.parts[c] for c in causes]) if causes else np.empty(0), "f4"),
        "start": _column(np.rint(timeline.start_s[order] / span_s * _LAST_TICK), "u4"),
        "end": _column(np.rint(timeline.end_s[order] / span_s * _LAST_TICK), "u4"),
        "kind": _column(timeline.kind[order], "u1"),
        "key": _column(timeline.cost_key[order], "i4"),
        "waited": _column(np.where(waited >= 0, new_index[np.maximum(waited, 0)], -1), "i4"),
        "path": _column(on_path[order], "u1"),
        "attributes": attributes,
    }


def memory_payload(timeline: Timeline, memory: tuple[RankMemory, ...]) -> dict[str, Any]:
    """Return memory over time as ``memory.js`` draws it: for each rank class a stacked step function in bytes, thinned
    so that every peak survives.

    What is alive at a rank's peak and not in its trace (context, buffers) is constant and goes on top.
    """
    peaks = {rank.rank: rank for rank in memory}
    constant = [
        {} if rank not in peaks else {n: b for n, b in peaks[rank].alive.items() if b and n not in trace.categories}
        for rank, trace in zip([r.name for r in timeline.ranks], timeline.memory)
    ]
    traced = (name for trace in timeline.memory for name in trace.categories)
    categories = list(dict.fromkeys([*traced, *(name for extra in constant for name in extra)]))
    ranks = []
    for name, trace, extra in zip([r.name for r in timeline.ranks], timeline.memory, constant):
        kept = _peaks(trace)
        rows = {c: trace.num_bytes[i, kept] for i, c in enumerate(trace.categories)}
        values = np.concatenate([rows.get(c, np.full(len(kept), extra.get(c, 0.0))) for c in categories])
        capacity = peaks[name].capacity_bytes if name in peaks else 0.0
        ranks.append({"time": _column(trace.time_s[kept], "f4"), "values": _column(values, "f4"), "capacity": capacity})
    return {"seconds": timeline.makespan_s or 1.0, "categories": categories, "ranks": ranks}


def _kept(timeline: Timeline, max_spans: int) -> tuple[NDArray[np.int64], str]:
    """The spans to carry and, when they are not all, a sentence that says which."""
    everything = np.arange(timeline.num_spans)
    if timeline.num_spans <= max_spans:
        return everything, ""
    microbatch = timeline.attribute("microbatch")
    last = int(microbatch.max(initial=-1))
    edge = (last + 1) // 2
    while edge > 1 and _at_edges(microbatch, edge, last).sum() > max_spans:
        edge = edge * 3 // 4
    chosen = np.flatnonzero(_at_edges(microbatch, edge, last))[:max_spans]
    return chosen, (
        f"{timeline.num_spans:,} tasks are too many for one page: shown are {len(chosen):,} of the first and last "
        f"{edge:,} of {last + 1:,} microbatches. The trace file has all of them."
    )


def _at_edges(microbatch: NDArray, edge: int, last: int) -> NDArray[np.bool_]:
    return (microbatch < edge) | (microbatch > last - edge)


def _lanes(timeline: Timeline, order: NDArray) -> list[list[int]]:
    """[rank, queue, first span, number of spans] of each lane, in the order of the sorted spans."""
    lane = timeline.rank[order].astype(np.int64) * len(QUEUES) + timeline.queue[order]
    values, first, count = np.unique(lane, return_index=True, return_counts=True)
    return [[int(v) // len(QUEUES), int(v) % len(QUEUES), int(f), int(c)] for v, f, c in zip(values, first, count)]


def _peaks(trace: MemoryTrace) -> NDArray[np.int64]:
    """Positions to keep: all, or of each of many equal runs the first and the highest."""
    n = len(trace.time_s)
    if n <= MAX_MEMORY_POINTS:
        return np.arange(n)
    total = trace.total
    runs = np.array_split(np.arange(n), MAX_MEMORY_POINTS // 2)
    return np.unique([i for run in runs for i in (run[0], run[np.argmax(total[run])])])


def _column(values: NDArray, dtype: str) -> list[str]:
    """[type, base64 of the deflated little-endian array]."""
    packed = zlib.compress(np.ascontiguousarray(values).astype(f"<{dtype}").tobytes(), 9)
    return [dtype, base64.b64encode(packed).decode("ascii")]
