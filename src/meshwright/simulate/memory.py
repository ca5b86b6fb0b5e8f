"""Memory over time: the events of a timed graph replayed per rank class."""

from __future__ import annotations

import numpy as np

from meshwright.graph import MemoryEvents, TaskGraph
from meshwright.native import Float64s, Int32s, OutFloat64s, native
from meshwright.timeline import MemoryTrace

#: Times of memory events, and the order in which they are replayed.
Ordered = tuple[np.ndarray, np.ndarray]


def peaks(
    graph: TaskGraph,
    start_s: np.ndarray,
    end_s: np.ndarray,
    num_ranks: int,
    copies: dict[str, float] | None = None,
    known: Ordered | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of each rank class's peak [R], and the bytes alive then by category [R, C]; `copies` multiplies a
    category. The events' order is worked out unless it is known."""
    events = graph.memory
    if events is None:
        return np.zeros(num_ranks), np.zeros((num_ranks, 0))
    time, order = known or ordered(events, start_s, end_s)
    num_bytes = events.num_bytes[order]
    times = np.array([(copies or {}).get(c, 1.0) for c in events.categories])
    if (times != 1.0).any():
        num_bytes = num_bytes * times[events.category[order]]
    n, num_categories = len(order), len(events.categories)
    at, alive = np.zeros(num_ranks), np.zeros((num_ranks, num_categories))
    room = np.zeros(alive.size), np.zeros(num_ranks), np.zeros(num_ranks)
    columns = events.rank[order], time[order], num_bytes, events.category[order]
    _peaks(*columns, n, num_categories, *room, at, alive.ravel())
    return at, alive


def traces(
    graph: TaskGraph,
    start_s: np.ndarray,
    end_s: np.ndarray,
    static: tuple[dict[str, float], ...],
    copies: dict[str, float],
    known: Ordered | None = None,
    first: int = 0,
) -> tuple[MemoryTrace, ...]:
    """Bytes of every rank class from `first` on over time, constant categories included; `copies` multiplies a dynamic
    category."""
    events = graph.memory
    out = []
    if events is not None:
        time, order = known or ordered(events, start_s, end_s)
    for rank, constant in enumerate(static, first):
        mine = order[events.rank[order] == rank] if events is not None else np.empty(0, np.int64)
        dynamic = events.categories if events is not None else ()
        steps = np.zeros((len(dynamic), len(mine) + 1))
        if len(mine):
            steps[events.category[mine], np.arange(1, len(mine) + 1)] = events.num_bytes[mine]
        at = np.concatenate([[0.0], time[mine]]) if len(mine) else np.zeros(1)
        levels = np.cumsum(steps, axis=1) * np.array([[copies.get(c, 1.0)] for c in dynamic]).reshape(-1, 1)
        last = np.append(at[1:] != at[:-1], True)  # several events at one instant are one step
        fixed = np.repeat(np.array([list(constant.values())]).T, int(last.sum()), axis=1) if constant else None
        rows = levels[:, last] if fixed is None else np.concatenate([fixed.reshape(len(constant), -1), levels[:, last]])
        out.append(MemoryTrace(time_s=at[last], categories=(*constant, *dynamic), num_bytes=rows))
    return tuple(out)


def ordered(events: MemoryEvents, start_s: np.ndarray, end_s: np.ndarray) -> Ordered:
    """Times of the events and their order: by time, what happens at a task's end before what happens at the start of
    the one that follows at the same instant."""
    time = np.where(events.at_end, end_s[events.task], start_s[events.task])
    ends_first = np.concatenate([np.flatnonzero(events.at_end), np.flatnonzero(~events.at_end)])
    return time, ends_first[np.argsort(time[ends_first], kind="stable")]


@native("n")
def _peaks(
    rank: Int32s,
    time: Float64s,
    num_bytes: Float64s,
    category: Int32s,
    n: int,
    num_categories: int,
    now: OutFloat64s,
    total: OutFloat64s,
    best: OutFloat64s,
    at: OutFloat64s,
    alive: OutFloat64s,
) -> None:
    """Write ``at`` [ranks] and ``alive`` [ranks, categories] from n events in order; ``now`` [ranks, categories],
    ``total`` and ``best`` [ranks] are 0 before."""
    for i in range(n):
        r = rank[i]
        row = r * num_categories
        now[row + category[i]] += num_bytes[i]
        total[r] += num_bytes[i]
        if total[r] > best[r]:
            best[r] = total[r]
            at[r] = time[i]
            for c in range(row, row + num_categories):
                alive[c] = now[c]
