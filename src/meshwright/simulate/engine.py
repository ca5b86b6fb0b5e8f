"""The in-order engine: a CUDA stream runs in order, so a lowered graph is a DAG and its timeline a longest path.

One forward pass over the tasks in their stored (topological) order gives every start and end. Edges with a
lag of L steps make the graph a cyclic template: it is unrolled step by step, and the period of the steady
state comes out. ``reference_times`` is the same in plain Python, the definition the fast version is held to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.graph import TaskGraph
from meshwright.native import Float64s, Int32s, OutFloat64s, native

#: Draws that are timed together at most, and numbers that are kept for them.
TOGETHER, ROOM = 32, 2**22
Times = tuple[NDArray[np.float64], NDArray[np.float64]]


def times(graph: TaskGraph, durations_s: NDArray[np.float64]) -> Times:
    """Start and end of every task in seconds, [N] each. `durations_s` [num_keys] is indexed by cost key.

    Lagged edges are satisfied at the first step (nothing came before); see :func:`steady_state`.
    """
    n = graph.num_tasks
    start, end = np.empty(n), np.empty(n)
    _times(*_columns(graph), _seconds(durations_s), n, np.zeros(len(graph.streams)), start, end)
    return start, end


class Listed:
    """A small graph with its times by the same loop over lists, which is faster there than arrays."""

    def __init__(self, graph: TaskGraph):
        self._columns = tuple(column.tolist() for column in _columns(graph))
        self._num_tasks, self._num_streams = graph.num_tasks, len(graph.streams)

    def times(self, durations_s: list[float]) -> tuple[list[float], list[float]]:
        """:func:`times`."""
        n = self._num_tasks
        start, end = [0.0] * n, [0.0] * n
        _times.function(*self._columns, durations_s, n, [0.0] * self._num_streams, start, end)
        return start, end


def makespans(graph: TaskGraph, draws_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The makespan under each of D draws of the durations: `draws_s` [D, num_keys] -> [D] seconds.

    As many draws as there is room for go through the graph at a time, so that its edges are read less often.
    """
    out = np.zeros(len(draws_s))
    together = min(len(draws_s), TOGETHER, max(1, ROOM // max(graph.num_tasks, 1)))
    end = np.empty(graph.num_tasks * together)
    for first in range(0, len(draws_s), together):
        mine = _seconds(np.transpose(draws_s[first : first + together]))
        free, longest = np.zeros(len(graph.streams) * mine.shape[1]), np.zeros(mine.shape[1])
        _makespans(*_columns(graph), mine.ravel(), graph.num_tasks, mine.shape[1], free, end, longest)
        out[first : first + together] = longest
    return out


def steady_state(graph: TaskGraph, durations_s: NDArray[np.float64], num_steps: int) -> NDArray[np.float64]:
    """End of each of `num_steps` successive steps [num_steps], streams and lagged edges carried over.

    The last difference is the steady-state period, the first entry the cold step.
    """
    depth = int(graph.dep_lag.max(initial=0)) + 1
    n, ends = graph.num_tasks, np.empty(num_steps)
    room = np.zeros(depth * n), np.zeros(len(graph.streams))
    _unroll(*_columns(graph), _seconds(durations_s), n, num_steps, depth, *room, ends)
    return ends


def _columns(graph: TaskGraph) -> tuple[NDArray, ...]:
    """The arrays of a graph that the loops below read."""
    return graph.member_ptr, graph.member, graph.dep_ptr, graph.dep, graph.dep_lag, graph.cost_key


def _seconds(values: NDArray) -> NDArray[np.float64]:
    return np.ascontiguousarray(values, np.float64)


def reference_times(graph: TaskGraph, durations_s: NDArray[np.float64]) -> Times:
    """Return the start and end of every task in seconds, as :func:`times` does, written for reading: a task starts when
    its streams are free and its dependencies have ended."""
    free = [0.0] * len(graph.streams)
    start, end = [0.0] * graph.num_tasks, [0.0] * graph.num_tasks
    for i in range(graph.num_tasks):
        streams = graph.member[graph.member_ptr[i] : graph.member_ptr[i + 1]]
        edges = range(graph.dep_ptr[i], graph.dep_ptr[i + 1])
        ready = [end[graph.dep[e]] for e in edges if graph.dep_lag[e] == 0]
        start[i] = max([0.0, *ready, *(free[s] for s in streams)])
        end[i] = start[i] + float(durations_s[graph.cost_key[i]])
        for s in streams:
            free[s] = end[i]
    return np.array(start), np.array(end)


@native("n")
def _times(
    member_ptr: Int32s,
    member: Int32s,
    dep_ptr: Int32s,
    dep: Int32s,
    dep_lag: Int32s,
    cost_key: Int32s,
    durations: Float64s,
    n: int,
    free: OutFloat64s,
    start: OutFloat64s,
    end: OutFloat64s,
) -> None:
    """Write ``start`` and ``end`` [n]; ``free`` [streams] is 0 before."""
    for i in range(n):
        t = 0.0
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0:
                t = max(t, end[dep[k]])
        for k in range(member_ptr[i], member_ptr[i + 1]):
            t = max(t, free[member[k]])
        start[i] = t
        t += durations[cost_key[i]]
        end[i] = t
        for k in range(member_ptr[i], member_ptr[i + 1]):
            free[member[k]] = t


@native("n", "num_draws")
def _makespans(
    member_ptr: Int32s,
    member: Int32s,
    dep_ptr: Int32s,
    dep: Int32s,
    dep_lag: Int32s,
    cost_key: Int32s,
    draws: Float64s,
    n: int,
    num_draws: int,
    free: OutFloat64s,
    end: OutFloat64s,
    out: OutFloat64s,
) -> None:
    """Write ``out`` [num_draws]; ``draws`` are [keys, num_draws], ``free`` [streams, num_draws] and ``out`` 0 before,
    ``end`` [n, num_draws] room to work in. The innermost loops go over draws and have no branches, which compilers turn
    into vector instructions."""
    for i in range(n):
        row = i * num_draws
        for r in range(num_draws):
            end[row + r] = 0.0
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0:
                before = dep[k] * num_draws
                for r in range(num_draws):
                    end[row + r] = end[before + r] if end[before + r] > end[row + r] else end[row + r]
        for k in range(member_ptr[i], member_ptr[i + 1]):
            before = member[k] * num_draws
            for r in range(num_draws):
                end[row + r] = free[before + r] if free[before + r] > end[row + r] else end[row + r]
        key = cost_key[i] * num_draws
        for r in range(num_draws):
            end[row + r] += draws[key + r]
            out[r] = end[row + r] if end[row + r] > out[r] else out[r]
        for k in range(member_ptr[i], member_ptr[i + 1]):
            before = member[k] * num_draws
            for r in range(num_draws):
                free[before + r] = end[row + r]


@native("n", "num_steps")
def _unroll(
    member_ptr: Int32s,
    member: Int32s,
    dep_ptr: Int32s,
    dep: Int32s,
    dep_lag: Int32s,
    cost_key: Int32s,
    durations: Float64s,
    n: int,
    num_steps: int,
    depth: int,
    history: OutFloat64s,
    free: OutFloat64s,
    ends: OutFloat64s,
) -> None:
    """Write ``ends`` [num_steps]; ``history`` [depth, n] and ``free`` [streams] are 0 before."""
    for step in range(num_steps):
        row = (step % depth) * n
        longest = 0.0
        for i in range(n):
            t = 0.0
            for k in range(dep_ptr[i], dep_ptr[i + 1]):
                lag = dep_lag[k]
                if step >= lag:
                    t = max(t, history[(step - lag) % depth * n + dep[k]])
            for k in range(member_ptr[i], member_ptr[i + 1]):
                t = max(t, free[member[k]])
            t += durations[cost_key[i]]
            history[row + i] = t
            longest = max(longest, t)
            for k in range(member_ptr[i], member_ptr[i + 1]):
                free[member[k]] = t
        ends[step] = longest
