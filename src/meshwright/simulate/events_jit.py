"""The compiled loop of the event engine; what it computes is said by ``events.reference_times``.

In-order streams are edges from each task to the next. Streams that choose keep the ready tasks that found them busy
in a heap each, so an instant costs what changes in it. Rates are shared anew only among the transfers that a
change can reach over shared links.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

NONE = -1


class TaskHeap(NamedTuple):
    """Running tasks in a binary heap by the time at which something happens to them; ``at`` is a task's place."""

    time: np.ndarray
    heap: np.ndarray
    at: np.ndarray
    size: np.ndarray


class Ready(NamedTuple):
    """Ready tasks by preference: one skew heap per stream (Sleator and Tarjan, 1986) for those that found it busy, and
    in ``root[num_streams]`` those to be looked at now. A task is in one of them; ``origin`` says from where."""

    place: np.ndarray
    left: np.ndarray
    right: np.ndarray
    root: np.ndarray
    origin: np.ndarray


class Flows(NamedTuple):
    """Transfers under way. ``head`` [L] starts each link's chain of the CSR positions that cross it now (``after``,
    ``before``); ``owner`` is the task of a position; ``seen_*`` hold the number of the last visit."""

    link_ptr: np.ndarray
    link: np.ndarray
    owner: np.ndarray
    capacity: np.ndarray
    head: np.ndarray
    after: np.ndarray
    before: np.ndarray
    left: np.ndarray
    rate: np.ndarray
    since: np.ndarray
    flowing: np.ndarray
    room: np.ndarray
    count: np.ndarray
    seen_link: np.ndarray
    seen_task: np.ndarray
    links: np.ndarray
    tasks: np.ndarray


@njit(cache=True, error_model="numpy")
def run(member_ptr, member, dep_ptr, dep, dep_lag, duration, dynamic, place, num_bytes, link_ptr, link, capacity):
    """Start and end [N] of every task."""
    n, num_streams = len(duration), len(dynamic)
    waiting, successor_ptr, successor = _edges(member_ptr, member, dep_ptr, dep, dep_lag, dynamic)
    clock = TaskHeap(np.zeros(n), np.zeros(n, np.int64), np.full(n, NONE), np.zeros(1, np.int64))
    ready = Ready(place, np.full(n, NONE), np.full(n, NONE), np.full(num_streams + 1, NONE), np.full(n, NONE))
    flows = _no_flows(n, link_ptr, link, capacity)
    busy = np.zeros(num_streams, np.bool_)
    start, end = np.zeros(n), np.zeros(n)
    for i in range(n):
        if waiting[i] == 0:
            _put(ready, num_streams, i)
    now, visit = 0.0, 0
    while True:
        _start(ready, busy, dynamic, member_ptr, member, duration, clock, start, now)
        if clock.size[0] == 0:
            return start, end
        now = clock.time[clock.heap[0]]
        touched = 0
        while clock.size[0] > 0 and clock.time[clock.heap[0]] == now:
            i = _pop(clock)
            if num_bytes[i] > 0 and link_ptr[i + 1] > link_ptr[i] and not flows.flowing[i]:
                _join(flows, i, num_bytes[i], now)
                touched = _touch(flows, i, touched, visit + 1)
                continue
            if flows.flowing[i]:
                _leave(flows, i)
                touched = _touch(flows, i, touched, visit + 1)
            end[i] = now
            _release(ready, busy, dynamic, member_ptr, member, i)
            for k in range(successor_ptr[i], successor_ptr[i + 1]):
                j = successor[k]
                waiting[j] -= 1
                if waiting[j] == 0:
                    _put(ready, num_streams, j)
        if touched:
            visit += 1
            _share(flows, clock, touched, visit, now)


@njit(cache=True)
def _edges(member_ptr, member, dep_ptr, dep, dep_lag, dynamic):
    """Return the number of tasks that each waits for, and its successors (CSR): by dependencies and by order of
    streams."""
    n = len(member_ptr) - 1
    waiting, fan_out = np.zeros(n, np.int64), np.zeros(n + 1, np.int64)
    previous, last = np.full(len(member), NONE), np.full(len(dynamic), NONE)
    for i in range(n):
        for k in range(member_ptr[i], member_ptr[i + 1]):
            s = member[k]
            if not dynamic[s]:
                previous[k] = last[s]
                last[s] = i
                if previous[k] >= 0:
                    waiting[i] += 1
                    fan_out[previous[k] + 1] += 1
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0:
                waiting[i] += 1
                fan_out[dep[k] + 1] += 1
    successor_ptr = np.cumsum(fan_out)
    fill, successor = successor_ptr[:-1].copy(), np.empty(successor_ptr[n], np.int64)
    for i in range(n):
        for k in range(member_ptr[i], member_ptr[i + 1]):
            if previous[k] >= 0:
                successor[fill[previous[k]]] = i
                fill[previous[k]] += 1
        for k in range(dep_ptr[i], dep_ptr[i + 1]):
            if dep_lag[k] == 0:
                successor[fill[dep[k]]] = i
                fill[dep[k]] += 1
    return waiting, successor_ptr, successor


@njit(cache=True)
def _start(ready, busy, dynamic, member_ptr, member, duration, clock, start, now):
    """Start the ready tasks, best first. A task that finds a stream busy waits there; the next of the stream it came
    from is then looked at in its stead."""
    now_heap = len(busy)
    while ready.root[now_heap] >= 0:
        i = _take(ready, now_heap)
        blocked = NONE
        for k in range(member_ptr[i], member_ptr[i + 1]):
            if dynamic[member[k]] and busy[member[k]]:
                blocked = member[k]
                break
        came_from, ready.origin[i] = ready.origin[i], NONE
        if blocked >= 0:
            _put(ready, blocked, i)
        else:
            start[i] = now
            for k in range(member_ptr[i], member_ptr[i + 1]):
                busy[member[k]] = True
            _schedule(clock, i, now + duration[i])
        if came_from >= 0 and not busy[came_from]:
            _offer(ready, now_heap, came_from)


@njit(cache=True)
def _release(ready, busy, dynamic, member_ptr, member, i):
    for k in range(member_ptr[i], member_ptr[i + 1]):
        s = member[k]
        busy[s] = False
        if dynamic[s]:
            _offer(ready, len(busy), s)


@njit(cache=True)
def _offer(ready, now_heap, stream):
    """Move the best of the tasks that wait for a stream to the heap of tasks that may start now."""
    if ready.root[stream] >= 0:
        i = _take(ready, stream)
        ready.origin[i] = stream
        _put(ready, now_heap, i)


@njit(cache=True)
def _put(ready, which, i):
    ready.left[i] = NONE
    ready.right[i] = NONE
    ready.root[which] = _merge(ready, ready.root[which], i)


@njit(cache=True)
def _take(ready, which):
    i = ready.root[which]
    ready.root[which] = _merge(ready, ready.left[i], ready.right[i])
    return i


@njit(cache=True)
def _merge(ready, a, b):
    """Two skew heaps as one: along the right spines, swapping children on the way."""
    if a < 0 or b < 0:
        return max(a, b)
    if ready.place[b] < ready.place[a]:
        a, b = b, a
    root = a
    while True:
        c = ready.right[a]
        ready.right[a] = ready.left[a]
        if c < 0:
            ready.left[a] = b
            return root
        if ready.place[b] < ready.place[c]:
            b, c = c, b
        ready.left[a] = c
        a = c


@njit(cache=True)
def _schedule(clock, i, when):
    """A task is due at another time, or for the first time."""
    clock.time[i] = when
    if clock.at[i] < 0:
        clock.at[i] = clock.size[0]
        clock.heap[clock.size[0]] = i
        clock.size[0] += 1
    _sift_up(clock, clock.at[i])
    _sift_down(clock, clock.at[i])


@njit(cache=True)
def _pop(clock):
    i = clock.heap[0]
    clock.at[i] = NONE
    clock.size[0] -= 1
    if clock.size[0] > 0:
        clock.heap[0] = clock.heap[clock.size[0]]
        clock.at[clock.heap[0]] = 0
        _sift_down(clock, 0)
    return i


@njit(cache=True)
def _sift_up(clock, k):
    i = clock.heap[k]
    while k > 0 and clock.time[clock.heap[(k - 1) // 2]] > clock.time[i]:
        clock.heap[k] = clock.heap[(k - 1) // 2]
        clock.at[clock.heap[k]] = k
        k = (k - 1) // 2
    clock.heap[k] = i
    clock.at[i] = k


@njit(cache=True)
def _sift_down(clock, k):
    i, size = clock.heap[k], clock.size[0]
    while 2 * k + 1 < size:
        child = 2 * k + 1
        if child + 1 < size and clock.time[clock.heap[child + 1]] < clock.time[clock.heap[child]]:
            child += 1
        if clock.time[clock.heap[child]] >= clock.time[i]:
            break
        clock.heap[k] = clock.heap[child]
        clock.at[clock.heap[k]] = k
        k = child
    clock.heap[k] = i
    clock.at[i] = k


@njit(cache=True)
def _no_flows(n, link_ptr, link, capacity):
    num_links, crossings = len(capacity), len(link)
    owner = np.zeros(crossings, np.int64)
    for i in range(n):
        owner[link_ptr[i] : link_ptr[i + 1]] = i
    return Flows(
        link_ptr,
        link,
        owner,
        capacity,
        np.full(num_links, NONE),
        np.full(crossings, NONE),
        np.full(crossings, NONE),
        np.zeros(n),
        np.zeros(n),
        np.zeros(n),
        np.zeros(n, np.bool_),
        np.zeros(num_links),
        np.zeros(num_links, np.int64),
        np.zeros(num_links, np.int64),
        np.zeros(n, np.int64),
        np.zeros(num_links, np.int64),
        np.zeros(n, np.int64),
    )


@njit(cache=True)
def _join(flows, i, num_bytes, now):
    flows.flowing[i] = True
    flows.left[i], flows.rate[i], flows.since[i] = num_bytes, 0.0, now
    for k in range(flows.link_ptr[i], flows.link_ptr[i + 1]):
        first = flows.head[flows.link[k]]
        flows.after[k], flows.before[k] = first, NONE
        if first >= 0:
            flows.before[first] = k
        flows.head[flows.link[k]] = k


@njit(cache=True)
def _leave(flows, i):
    flows.flowing[i] = False
    for k in range(flows.link_ptr[i], flows.link_ptr[i + 1]):
        before, after = flows.before[k], flows.after[k]
        if before >= 0:
            flows.after[before] = after
        else:
            flows.head[flows.link[k]] = after
        if after >= 0:
            flows.before[after] = before


@njit(cache=True)
def _touch(flows, i, touched, visit):
    """Notes the links of a flow that came or went; returns how many are noted."""
    for k in range(flows.link_ptr[i], flows.link_ptr[i + 1]):
        link = flows.link[k]
        if flows.seen_link[link] != visit:
            flows.seen_link[link] = visit
            flows.links[touched] = link
            touched += 1
    return touched


@njit(cache=True, error_model="numpy")
def _share(flows, clock, num_links, visit, now):
    """New rates for every flow that the noted links reach: progressive filling."""
    num_tasks, k = 0, 0
    while k < num_links:
        link = flows.links[k]
        flows.room[link], flows.count[link] = flows.capacity[link], 0
        position = flows.head[link]
        while position >= 0:
            i = flows.owner[position]
            flows.count[link] += 1
            if flows.seen_task[i] != visit:
                flows.seen_task[i] = visit
                flows.tasks[num_tasks] = i
                num_tasks += 1
                num_links = _touch(flows, i, num_links, visit)
            position = flows.after[position]
        k += 1
    settled = 0
    while settled < num_tasks:
        tightest, least = NONE, np.inf
        for k in range(num_links):
            link = flows.links[k]
            if flows.count[link] > 0:
                share = flows.room[link] / flows.count[link]
                if tightest < 0 or share < least or (share == least and link < tightest):
                    tightest, least = link, share
        position = flows.head[tightest]
        while position >= 0:
            i = flows.owner[position]
            if flows.seen_task[i] == visit:
                flows.seen_task[i] = NONE
                settled += 1
                _settle(flows, clock, i, least, now)
            position = flows.after[position]


@njit(cache=True, error_model="numpy")
def _settle(flows, clock, i, rate, now):
    for k in range(flows.link_ptr[i], flows.link_ptr[i + 1]):
        flows.room[flows.link[k]] -= rate
        flows.count[flows.link[k]] -= 1
    if rate != flows.rate[i]:
        flows.left[i] = max(0.0, flows.left[i] - flows.rate[i] * (now - flows.since[i]))
        flows.rate[i], flows.since[i] = rate, now
        _schedule(clock, i, now + flows.left[i] / rate)
