"""Passes over a task graph whose streams run in order, O(V + E) each: its topological order (Kahn, 1962), and what
each task of a timed graph waited for."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True)
def topological_order(
    member_ptr: NDArray, member: NDArray, dep_ptr: NDArray, dep: NDArray, dep_lag: NDArray, num_streams: int
) -> tuple[NDArray, int]:
    """Order in which tasks become ready: (order [N], how many of it are valid).

    A task is ready when the previous task of each of its streams and every dependency without lag are
    ordered. Fewer than N valid entries mean a cycle. Ties go to the lower number, round by round, so that
    the order is deterministic.
    """
    n = len(member_ptr) - 1
    waiting = np.zeros(n, np.int32)
    fan_out = np.zeros(n + 1, np.int32)
    last = np.full(num_streams, -1, np.int64)
    # Program order on a stream is one more edge: (previous task of the stream) -> task.
    previous = np.full(len(member), -1, np.int64)
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
    successor = np.empty(fan_out[n], np.int32)
    fill = fan_out[:-1].copy()
    for i in range(n):
        for k in range(member_ptr[i], member_ptr[i + 1]):
            if previous[k] >= 0:
                successor[fill[previous[k]]] = i
                fill[previous[k]] += 1
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0:
                successor[fill[dep[k]]] = i
                fill[dep[k]] += 1
    order = np.empty(n, np.int64)
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
    return order, tail


@njit(cache=True)
def binding(
    member_ptr: NDArray,
    member: NDArray,
    dep_ptr: NDArray,
    dep: NDArray,
    dep_lag: NDArray,
    start: NDArray,
    end: NDArray,
) -> NDArray:
    """For each task the predecessor whose end let it start, -1 when it started at the beginning.

    Dependencies win ties over the previous task of the own stream: they say more. A stream's order is the one its
    tasks ran in, which on streams that choose is not the graph's.
    """
    n = len(member_ptr) - 1
    num_streams = 0
    for k in range(len(member)):
        num_streams = max(num_streams, member[k] + 1)
    last = np.full(num_streams, -1, np.int64)
    out = np.full(n, -1, np.int64)
    order = np.arange(n)
    if not _ran_as_stored(member_ptr, member, start, num_streams):
        order = order[np.argsort(end, kind="mergesort")]
        order = order[np.argsort(start[order], kind="mergesort")]
    for i in order:
        best, latest = -1, 0.0
        for k in range(member_ptr[i], member_ptr[i + 1]):
            p = last[member[k]]
            if p >= 0 and end[p] > latest:
                best, latest = p, end[p]
            last[member[k]] = i
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0 and end[dep[k]] >= latest and end[dep[k]] > 0.0:
                best, latest = dep[k], end[dep[k]]
        if best >= 0 and latest >= start[i] - 1e-12:
            out[i] = best
    return out


@njit(cache=True)
def _ran_as_stored(member_ptr: NDArray, member: NDArray, start: NDArray, num_streams: int) -> bool:
    """Whether the tasks of every stream started in the order in which they are stored."""
    last = np.zeros(num_streams)
    for i in range(len(start)):
        for k in range(member_ptr[i], member_ptr[i + 1]):
            if start[i] < last[member[k]]:
                return False
            last[member[k]] = start[i]
    return True
