"""The in-order engine: a CUDA stream runs in order, so a lowered graph is a DAG and its timeline a longest path.

One forward pass over the tasks in their stored (topological) order gives every start and end. Edges with a
lag of L steps make the graph a cyclic template: it is unrolled step by step, and the period of the steady
state comes out. ``reference_times`` is the same in plain Python, the definition the fast version is held to.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshwright.graph import TaskGraph

Times = tuple[NDArray[np.float64], NDArray[np.float64]]


def times(graph: TaskGraph, durations_s: NDArray[np.float64]) -> Times:
    """Start and end of every task in seconds, [N] each. `durations_s` [num_keys] is indexed by cost key.

    Lagged edges are satisfied at the first step (nothing came before); see :func:`steady_state`.
    """
    return _times(
        graph.member_ptr,
        graph.member,
        graph.dep_ptr,
        graph.dep,
        graph.dep_lag,
        graph.cost_key,
        durations_s,
        len(graph.streams),
        graph.has_lag,
    )


def makespans(graph: TaskGraph, draws_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The makespan under each of D draws of the durations: `draws_s` [D, num_keys] -> [D] seconds."""
    return _makespans(
        graph.member_ptr,
        graph.member,
        graph.dep_ptr,
        graph.dep,
        graph.dep_lag,
        graph.cost_key,
        np.ascontiguousarray(draws_s),
        len(graph.streams),
    )


def steady_state(graph: TaskGraph, durations_s: NDArray[np.float64], num_steps: int) -> NDArray[np.float64]:
    """End of each of `num_steps` successive steps [num_steps], streams and lagged edges carried over.

    The last difference is the steady-state period, the first entry the cold step.
    """
    depth = int(graph.dep_lag.max(initial=0)) + 1
    return _unroll(
        graph.member_ptr,
        graph.member,
        graph.dep_ptr,
        graph.dep,
        graph.dep_lag,
        graph.cost_key,
        durations_s,
        len(graph.streams),
        num_steps,
        depth,
    )


def reference_times(graph: TaskGraph, durations_s: NDArray[np.float64]) -> Times:
    """What :func:`times` computes, written for reading: a task starts when its streams are free and its
    dependencies have ended."""
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


@njit(cache=True, boundscheck=False)
def _times(member_ptr, member, dep_ptr, dep, dep_lag, cost_key, durations, num_streams, has_lag):
    n = len(cost_key)
    start, end = np.empty(n), np.empty(n)
    free = np.zeros(num_streams)
    d, m = 0, 0
    for i in range(n):
        t = 0.0
        d_end, m_first, m_end = dep_ptr[i + 1], m, member_ptr[i + 1]
        while d < d_end:
            if not has_lag or dep_lag[d] == 0:
                t = max(t, end[dep[d]])
            d += 1
        while m < m_end:
            t = max(t, free[member[m]])
            m += 1
        start[i] = t
        t += durations[cost_key[i]]
        end[i] = t
        for k in range(m_first, m_end):
            free[member[k]] = t
    return start, end


@njit(cache=True)
def _makespans(member_ptr, member, dep_ptr, dep, dep_lag, cost_key, draws, num_streams):
    out = np.empty(len(draws))
    for r in range(len(draws)):
        n = len(cost_key)
        end = np.empty(n)
        free = np.zeros(num_streams)
        longest = 0.0
        for i in range(n):
            t = 0.0
            for k in range(dep_ptr[i], dep_ptr[i + 1]):
                if dep_lag[k] == 0:
                    t = max(t, end[dep[k]])
            for k in range(member_ptr[i], member_ptr[i + 1]):
                t = max(t, free[member[k]])
            t += draws[r, cost_key[i]]
            end[i] = t
            longest = max(longest, t)
            for k in range(member_ptr[i], member_ptr[i + 1]):
                free[member[k]] = t
        out[r] = longest
    return out


@njit(cache=True)
def _unroll(member_ptr, member, dep_ptr, dep, dep_lag, cost_key, durations, num_streams, num_steps, depth):
    n = len(cost_key)
    history = np.zeros((depth, n))
    free = np.zeros(num_streams)
    ends = np.empty(num_steps)
    for step in range(num_steps):
        row = step % depth
        longest = 0.0
        for i in range(n):
            t = 0.0
            for k in range(dep_ptr[i], dep_ptr[i + 1]):
                lag = dep_lag[k]
                if step >= lag:
                    t = max(t, history[(step - lag) % depth, dep[k]])
            for k in range(member_ptr[i], member_ptr[i + 1]):
                t = max(t, free[member[k]])
            t += durations[cost_key[i]]
            history[row, i] = t
            longest = max(longest, t)
            for k in range(member_ptr[i], member_ptr[i + 1]):
                free[member[k]] = t
        ends[step] = longest
    return ends
