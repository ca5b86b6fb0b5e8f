"""Replicas that take steps at paces of their own and meet now and then: a max-plus recurrence over replicas and steps.

A replica's step takes what is given for it. After some steps a part of its state is due, and replicas exchange it: an
exchange begins when all that meet are there, so that a sum of all waits for the slowest replica, and an exchange with
neighbours for the slowest of a few. Applied at once, it holds up the step; applied ``lag`` steps later, it goes on
beside the steps between, and holds up only what applies it. Where all steps are alike this is a round of
:mod:`meshwright.simulate.rounds`.

A message needs both of its ends, as in NCCL and gloo: a replica waits for those that it sends to as for those that it
hears. Messages of one replica share its port, each an equal part of what the exchange takes where all begin at once,
and those whose ends are there go before the others.

Baccelli et al., Synchronization and Linearity, 1992, is on such recurrences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.native import Float64s, Int32s, OutFloat64s, native
from meshwright.simulate.rounds import Round
from meshwright.sync.groups import Graph


class Due(NamedTuple):
    """Exchanges that are due in a run of steps: of every step and part whether it is ``sent`` and ``applied`` [steps,
    parts], and ``ends`` [rounds], the steps after which a round is over."""

    sent: NDArray[np.int32]
    applied: NDArray[np.int32]
    ends: NDArray[np.int64]


def paced(one: Round, due: Due, graph: Graph | None, steps_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when every replica has ended every step, in seconds [steps, replicas].

    `steps_s` [steps, replicas] are seconds of a replica's steps by itself, in which nothing is due; `graph` says who
    meets in each part (its turns), None: all meet.
    """
    num_steps, n = steps_s.shape
    queues = max(1, *(len(p.busy_s) for p in one.parts))
    columns = 2 + 2 * queues
    table, width = np.zeros((len(one.parts), columns)), np.ones(len(one.parts), np.int32)
    for number, part in enumerate(one.parts):
        begins, busy = [0.0], [part.sends_s - one.inner_s]
        if one.lag:
            width[number], busy = len(part.busy_s), list(part.busy_s)
            begins = [end - one.inner_s - long for end, long in zip(part.ends_s, part.busy_s)]
            table[number, :2] = part.sends_s - one.inner_s, part.applies_s - one.inner_s
        table[number, 2 : 2 + 2 * len(begins)] = np.ravel(np.column_stack((begins, busy)))
    pointer, met = _messages(graph, n)
    most = int(np.diff(pointer).max(initial=1))
    out = np.zeros(num_steps * n)
    room = [np.zeros(size) for size in (n, n, n, most, queues * n, (one.lag + 1) * len(one.parts) * n)]
    _paced(
        np.ascontiguousarray(steps_s).ravel(), num_steps, n, np.ascontiguousarray(due.sent).ravel(),
        np.ascontiguousarray(due.applied).ravel(), len(one.parts), one.lag, table.ravel(), columns, width,
        int(graph is not None), pointer, met, *room, out,
    )  # fmt: skip
    return out.reshape(num_steps, n)


def _messages(graph: Graph | None, n: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The others that every replica hears in every turn, and those that hear it, one list after the other, and where
    each begins; nothing where all meet."""
    if graph is None:
        return np.zeros(1, np.int32), np.zeros(1, np.int32)
    found: list[list[int]] = []
    for turn in graph.turns:
        hears = [[one.source for one in heard] for heard in turn]
        heard_by: list[list[int]] = [[] for _ in range(n)]
        for i, sources in enumerate(hears):
            for source in sources:
                heard_by[source].append(i)
        found += [some for both in zip(hears, heard_by) for some in both]
    pointer = np.cumsum([0, *map(len, found)]).astype(np.int32)
    return pointer, np.array([j for some in found for j in some] or [0], np.int32)


@native("num_steps", "n")
def _paced(
    steps_s: Float64s,
    num_steps: int,
    n: int,
    sent: Int32s,
    applied: Int32s,
    parts: int,
    lag: int,
    table: Float64s,
    columns: int,
    width: Int32s,
    some: int,
    pointer: Int32s,
    met: Int32s,
    begin: OutFloat64s,
    longer: OutFloat64s,
    ready: OutFloat64s,
    order: OutFloat64s,
    free: OutFloat64s,
    arrives: OutFloat64s,
    out: OutFloat64s,
) -> None:
    """Write ``out`` [steps, n]. A row of ``table`` is a part's seconds more of the step that sends it and of the one
    that applies it, then of every queue when its exchange begins after an own step's end, and how long it takes;
    ``some`` is above 0 where replicas meet some others alone. ``begin``, ``longer``, ``ready`` [n], ``order`` [others],
    ``free`` [queues, n] and ``arrives`` [lag + 1, parts, n] are 0 before."""
    for step in range(num_steps):
        own = step * n
        for i in range(n):
            longer[i] = 0.0
        for part in range(parts):
            row = part * columns
            slot = (step % (lag + 1) * parts + part) * n
            if sent[step * parts + part] == 1:
                for i in range(n):
                    arrives[slot + i] = 0.0
                for queue in range(width[part]):
                    after, busy, latest = table[row + 2 + 2 * queue], table[row + 3 + 2 * queue], 0.0
                    for i in range(n):
                        at = begin[i] + steps_s[own + i] + longer[i]
                        ready[i] = max(at + after, free[queue * n + i]) if lag > 0 else at
                        latest = max(latest, ready[i])
                    for i in range(n):
                        ends = latest + busy
                        if some > 0:
                            # a port carries its messages as their other ends come, and never rests while one is left
                            ends = ready[i] + busy
                            for way in range(2):
                                first = pointer[2 * (part * n + i) + way]
                                many = pointer[2 * (part * n + i) + way + 1] - first
                                for k in range(many):
                                    at = max(ready[i], ready[met[first + k]])
                                    place = k
                                    while place > 0 and order[place - 1] > at:
                                        order[place] = order[place - 1]
                                        place -= 1
                                    order[place] = at
                                for k in range(many):
                                    ends = max(ends, order[k] + busy * (many - k) / many)
                        if lag > 0:
                            free[queue * n + i] = ends
                        arrives[slot + i] = max(arrives[slot + i], ends)
                for i in range(n):
                    if lag == 0:
                        longer[i] = arrives[slot + i] - begin[i] - steps_s[own + i]
                    longer[i] += table[row]
            if lag > 0 and applied[step * parts + part] == 1:
                slot = ((step - lag) % (lag + 1) * parts + part) * n
                for i in range(n):
                    late = arrives[slot + i] - (begin[i] + steps_s[own + i] + longer[i])
                    longer[i] += max(0.0, late) + table[row + 1]
        for i in range(n):
            begin[i] += steps_s[own + i] + longer[i]
            out[own + i] = begin[i]
