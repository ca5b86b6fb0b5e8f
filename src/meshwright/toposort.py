"""Passes over a task graph whose streams run in order, O(V + E) each: its topological order (Kahn, 1962), and what
each task of a timed graph waited for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.native import Float64s, Int32s, Int64s, OutFloat64s, OutInt32s, OutInt64s, native


def topological_order(
    member_ptr: NDArray, member: NDArray, dep_ptr: NDArray, dep: NDArray, dep_lag: NDArray, num_streams: int
) -> tuple[NDArray, int]:
    """Order in which tasks become ready: (order [N], how many of it are valid).

    A task is ready when the previous task of each of its streams and every dependency without lag are
    ordered. Fewer than N valid entries mean a cycle. Ties go to the lower number, round by round, so that
    the order is deterministic.
    """
    n = len(member_ptr) - 1
    order = np.empty(n, np.int64)
    waiting, fan_out, fill = np.zeros(n, np.int32), np.zeros(n + 1, np.int32), np.empty(n, np.int32)
    last, previous = np.full(num_streams, -1, np.int32), np.empty(len(member), np.int32)
    successor = np.empty(len(member) + len(dep), np.int32)
    made = (order, waiting, fan_out, fill, last, previous, successor)
    return order, _ordered(member_ptr, member, dep_ptr, dep, dep_lag, n, *made)


@native("n")
def _ordered(
    member_ptr: Int32s,
    member: Int32s,
    dep_ptr: Int32s,
    dep: Int32s,
    dep_lag: Int32s,
    n: int,
    order: OutInt64s,
    waiting: OutInt32s,
    fan_out: OutInt32s,
    fill: OutInt32s,
    last: OutInt32s,
    previous: OutInt32s,
    successor: OutInt32s,
) -> int:
    """Write ``order`` [n] and return how many of it are valid. The rest is room to work in: ``waiting`` [n] and
    ``fan_out`` [n + 1] are 0 and ``last`` [streams] is -1 before."""
    # Program order on a stream is one more edge: (previous task of the stream) -> task.
    for i in range(n):
        for k in range(member_ptr[i], member_ptr[i + 1]):
            p = last[member[k]]
            previous[k] = p
            last[member[k]] = i
            if p >= 0:
                waiting[i] += 1
                fan_out[p + 1] += 1
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0:
                waiting[i] += 1
                fan_out[dep[k] + 1] += 1
    for i in range(n):
        fan_out[i + 1] += fan_out[i]
        fill[i] = fan_out[i]
    for i in range(n):
        for k in range(member_ptr[i], member_ptr[i + 1]):
            p = previous[k]
            if p >= 0:
                successor[fill[p]] = i
                fill[p] += 1
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0:
                successor[fill[dep[k]]] = i
                fill[dep[k]] += 1
    tail = 0
    for i in range(n):
        if waiting[i] == 0:
            order[tail] = i
            tail += 1
    head = 0
    while head < tail:
        i = order[head]
        head += 1
        for k in range(fan_out[i], fan_out[i + 1]):
            j = successor[k]
            waiting[j] -= 1
            if waiting[j] == 0:
                order[tail] = j
                tail += 1
    return tail


def binding(
    member_ptr: NDArray,
    member: NDArray,
    dep_ptr: NDArray,
    dep: NDArray,
    dep_lag: NDArray,
    start: NDArray,
    end: NDArray,
) -> NDArray:
    """Return for each task the predecessor whose end let it start, -1 when it started at the beginning.

    Dependencies win ties over the previous task of the own stream: they say more. A stream's order is the one its
    tasks ran in, which on streams that choose is not the graph's.
    """
    n = len(member_ptr) - 1
    num_streams = int(member.max(initial=-1)) + 1
    out, last = np.empty(n, np.int64), np.full(num_streams, -1, np.int64)
    order = np.arange(n)
    if not _ran_as_stored(member_ptr, member, start, n, np.zeros(num_streams)):
        order = np.lexsort((end, start))
    _bound(member_ptr, member, dep_ptr, dep, dep_lag, start, end, order, n, last, out)
    return out


@native("n")
def _bound(
    member_ptr: Int32s,
    member: Int32s,
    dep_ptr: Int32s,
    dep: Int32s,
    dep_lag: Int32s,
    start: Float64s,
    end: Float64s,
    order: Int64s,
    n: int,
    last: OutInt64s,
    out: OutInt64s,
) -> None:
    """Write ``out`` [n]; tasks are visited in ``order`` [n], and ``last`` [streams] is -1 before."""
    for place in range(n):
        i = order[place]
        best, latest = -1, 0.0
        for k in range(member_ptr[i], member_ptr[i + 1]):
            p = last[member[k]]
            if p >= 0 and end[p] > latest:
                best, latest = p, end[p]
            last[member[k]] = i
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0 and end[dep[k]] >= latest and end[dep[k]] > 0.0:
                best, latest = dep[k], end[dep[k]]
        out[i] = best if best >= 0 and latest >= start[i] - 1e-12 else -1


@native("n")
def _ran_as_stored(member_ptr: Int32s, member: Int32s, start: Float64s, n: int, last: OutFloat64s) -> int:
    """1 if the tasks of every stream started in the order in which they are stored, else 0; ``last`` [streams] is 0."""
    for i in range(n):
        for k in range(member_ptr[i], member_ptr[i + 1]):
            if start[i] < last[member[k]]:
                return 0
            last[member[k]] = start[i]
    return 1
