"""The event engine: dynamic order and shared links, where a longest path does not do (DESIGN.md, "Engine").

A stream is ``in_order`` (its tasks run in the graph's order, as on a CUDA stream) or ``priority`` (whenever it is
free, the best of the tasks that are ready runs: highest priority first, lower number on ties; nothing is
preempted or reserved). A task may be a *transfer*: after its duration, which is then its latency, its bytes flow
over a set of links. Concurrent transfers share the links max-min fairly: nobody's rate can grow without lowering
that of a slower one, found by progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2).

With streams in order and no transfers it computes what ``engine.times`` does. ``reference_times`` is the
definition in plain Python that the compiled loop (``events_jit.py``) is held to, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.graph import TaskGraph
from meshwright.simulate.engine import Times

POLICIES = ("in_order", "priority")


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers over shared links: the bytes that each of N tasks sends, and the links that they cross.

    ``num_bytes`` [N] is 0 for a task that is no transfer. ``link``/``link_ptr`` (CSR over the N tasks) are the links
    each one crosses, the same link twice if it passes twice; without any its bytes cost nothing.
    ``capacity_bytes_s`` [L] is positive and per direction: a link that is used both ways is two.
    """

    num_bytes: NDArray[np.float64]
    link_ptr: NDArray[np.int32]
    link: NDArray[np.int32]
    capacity_bytes_s: NDArray[np.float64]

    @classmethod
    def of(
        cls, num_tasks: int, capacity_bytes_s: Sequence[float], flows: dict[int, tuple[float, Sequence[int]]]
    ) -> Transfers:
        """From ``{task: (bytes, links)}``."""
        num_bytes, width = np.zeros(num_tasks), np.zeros(num_tasks, np.int64)
        for task, (size, links) in flows.items():
            num_bytes[task], width[task] = size, len(links)
        return cls(
            num_bytes=num_bytes,
            link_ptr=np.concatenate([[0], np.cumsum(width)]).astype(np.int32),
            link=np.array([link for task in sorted(flows) for link in flows[task][1]], np.int32),
            capacity_bytes_s=np.asarray(capacity_bytes_s, np.float64),
        )


def times(
    graph: TaskGraph,
    durations_s: NDArray[np.float64],
    *,
    policies: Sequence[str] | None = None,
    priority: NDArray | None = None,
    transfers: Transfers | None = None,
) -> Times:
    """Start and end of every task in seconds, [N] each.

    `durations_s` [num_keys] is indexed by cost key, `policies` names one of :data:`POLICIES` for every stream (default:
    all in order), `priority` [N] is higher for what goes first (default: all equal, so that the lower number does).
    Lagged edges are satisfied, as at a first step. Changing one transfer touches those it shares links with, directly
    or through others: F transfers over L such links cost O(F + L * L).
    """
    from meshwright.simulate.events_jit import run

    moved = transfers or Transfers.of(graph.num_tasks, (), {})
    return run(
        graph.member_ptr,
        graph.member,
        graph.dep_ptr,
        graph.dep,
        graph.dep_lag,
        np.asarray(durations_s, np.float64)[graph.cost_key],
        _dynamic(graph, policies),
        _place(graph, priority),
        moved.num_bytes,
        moved.link_ptr,
        moved.link,
        moved.capacity_bytes_s,
    )


def _dynamic(graph: TaskGraph, policies: Sequence[str] | None) -> NDArray[np.bool_]:
    """Return a mask of the streams with dynamic order, those that choose among ready tasks."""
    if policies is None:
        return np.zeros(len(graph.streams), np.bool_)
    return np.array([POLICIES.index(p) == 1 for p in policies], np.bool_)


def _place(graph: TaskGraph, priority: NDArray | None) -> NDArray[np.int64]:
    """Every task's place in the order of preference: by falling priority, then by number."""
    place = np.arange(graph.num_tasks)
    if priority is not None:
        place[np.argsort(-np.asarray(priority, np.float64), kind="stable")] = np.arange(graph.num_tasks)
    return place


def reference_times(
    graph: TaskGraph,
    durations_s: NDArray[np.float64],
    *,
    policies: Sequence[str] | None = None,
    priority: NDArray | None = None,
    transfers: Transfers | None = None,
) -> Times:
    """Return the start and end of every task in seconds, as :func:`times` does, written for reading.

    The clock jumps from instant to instant. At each: what is due ends (or, for a transfer whose latency is over, begins
    to flow), rates are shared anew if a flow came or went, and what can start does, best first.
    """
    n, place, dynamic = graph.num_tasks, _place(graph, priority), _dynamic(graph, policies)
    streams = [graph.member[a:b].tolist() for a, b in zip(graph.member_ptr[:-1], graph.member_ptr[1:])]
    needs = _predecessors(graph, dynamic)
    links, size, capacity = [()] * n, [0.0] * n, []
    if transfers is not None:
        ends = transfers.link_ptr.tolist()
        links = [transfers.link[a:b].tolist() for a, b in pairwise(ends)]
        size, capacity = transfers.num_bytes.tolist(), transfers.capacity_bytes_s.tolist()
    start, end = [np.nan] * n, [np.nan] * n
    due: dict[int, float] = {}  # running task -> when it ends or begins to flow
    flows: dict[int, _Flow] = {}
    waiting, ended, busy = set(range(n)), set(), set()
    now = 0.0
    while waiting or due:
        changed = False
        for task in [t for t, when in due.items() if when == now]:
            del due[task]
            if size[task] and links[task] and task not in flows:
                flows[task], changed = _Flow(size[task], now), True
                continue
            changed |= flows.pop(task, None) is not None
            end[task] = now
            ended.add(task)
            busy -= set(streams[task])
        if changed:
            rates = fair_rates({task: links[task] for task in flows}, capacity)
            for task, flow in flows.items():
                if rates[task] != flow.rate:
                    due[task] = flow.change(rates[task], now)
        for task in sorted((t for t in waiting if needs[t] <= ended), key=lambda t: place[t]):
            if not any(dynamic[s] and s in busy for s in streams[task]):
                start[task] = now
                due[task] = now + float(durations_s[graph.cost_key[task]])
                busy |= set(streams[task])
                waiting.remove(task)
        now = min(due.values(), default=now)
    return np.array(start), np.array(end)


def _predecessors(graph: TaskGraph, dynamic: NDArray[np.bool_]) -> list[set[int]]:
    """Return the tasks that each task waits for: its dependencies, and on in-order streams the task before it."""
    last: dict[int, int] = {}
    out = []
    for task in range(graph.num_tasks):
        edges = range(graph.dep_ptr[task], graph.dep_ptr[task + 1])
        found = {int(graph.dep[e]) for e in edges if graph.dep_lag[e] == 0}
        for stream in graph.member[graph.member_ptr[task] : graph.member_ptr[task + 1]].tolist():
            if not dynamic[stream]:
                if stream in last:
                    found.add(last[stream])
                last[stream] = task
        out.append(found)
    return out


class _Flow:
    """A transfer under way: the bytes that were left when its rate last changed."""

    def __init__(self, num_bytes: float, now: float):
        self.left, self.rate, self.since = num_bytes, 0.0, now

    def change(self, rate: float, now: float) -> float:
        """Goes on at another rate; returns when it will be through."""
        self.left = max(0.0, self.left - self.rate * (now - self.since))
        self.rate, self.since = rate, now
        return now + self.left / rate


def fair_rates(crossed: dict[int, Sequence[int]], capacity: Sequence[float]) -> dict[int, float]:
    """Max-min fair rate of every flow from the links it crosses, by progressive filling: the link that gives its flows
    the least settles theirs, what they take elsewhere is gone, and so on with the rest."""
    rates: dict[int, float] = {}
    room = dict(enumerate(capacity))
    while len(rates) < len(crossed):
        count: dict[int, int] = {}
        for flow, links in crossed.items():
            for link in links if flow not in rates else ():
                count[link] = count.get(link, 0) + 1
        share, tightest = min((room[link] / count[link], link) for link in count)
        for flow, links in crossed.items():
            if flow not in rates and tightest in links:
                rates[flow] = share
                for link in links:
                    room[link] -= share
    return rates
