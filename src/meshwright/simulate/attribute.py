"""Attribution of time: each rank's step split by cause, averaged over ranks, summing to the step time.

A compute task's time is split as its cost key is. Idle time of the compute queue is charged to what the next
task waited for: data-parallel exchange, the message itself, or other stages (the bubble). What a task takes longer than
its cost, where ranks share cores or ports, it waited for other ranks: that is bubble too.
"""

from __future__ import annotations

import numpy as np

from meshwright.causes import PRICED, STEP
from meshwright.graph import QUEUE
from meshwright.timeline import Timeline

#: Unequal work shows beside the timeline alone (:mod:`meshwright.answer.spread`): another one is needed to tell it.
#: Data is waited for before a step.
NAMES = tuple(cause.name for cause in STEP if cause.name not in ("unequal", "stragglers", "data"))
_DP = (QUEUE["dp"], QUEUE["dp_gather"], QUEUE["outer"])
_MOVED = tuple(QUEUE[name] for name in ("h2d", "d2h", "nvme", "host"))
_PP = tuple(QUEUE[name] for name in ("pp_forward", "pp_backward", "link_forward", "link_backward"))


def attribution(timeline: Timeline, parts: np.ndarray) -> dict[str, float]:
    """Seconds by cause, mean over real ranks; the values sum to the makespan. `parts` is [num_keys, causes]."""
    weight = np.array(timeline.multiplicity, float)
    weight /= weight.sum()
    makespan = timeline.makespan_s
    total = np.zeros(len(NAMES))
    compute = np.flatnonzero(timeline.queue == QUEUE["compute"])
    spans = compute[np.lexsort((timeline.start_s[compute], timeline.rank[compute]))]
    rank, start, end = timeline.rank[spans], timeline.start_s[spans], timeline.end_s[spans]
    share = weight[rank]
    by_key = np.bincount(timeline.cost_key[spans], weights=share, minlength=len(parts))
    total[: len(PRICED)] = by_key @ parts
    longer = float(((end - start) * share).sum()) - float(total[: len(PRICED)].sum())
    if longer > 1e-9 * makespan:  # not what rounding leaves
        total[NAMES.index("bubble")] += longer
    new_rank = np.append(True, rank[1:] != rank[:-1])
    gap = start - np.where(new_rank, 0.0, np.append(0.0, end[:-1]))
    late = timeline.waited_for[spans]
    queue = np.where(late >= 0, timeline.queue[late], -1)
    exchange, message = (np.isin(queue, which) for which in (_DP, _PP))
    # A message that waited for its turn was only in flight for its own length; the rest is waiting. An exchange is
    # often the last of several, so what counts is when this rank's exchange queues were busy.
    flight = np.where(message, np.minimum(gap, timeline.end_s[late] - timeline.start_s[late]), 0.0)
    flight[exchange] = _exchanging(timeline, rank[exchange], start[exchange] - gap[exchange], start[exchange])
    moved = {"dp": float((flight * share)[exchange].sum()), "pp": float((flight * share)[message].sum())}
    left = np.maximum(gap - flight, 0.0)
    if np.isin(timeline.queue, _MOVED).any():  # what is left of a gap, as far as state was on its way meanwhile
        carried = np.minimum(left, _exchanging(timeline, rank, start - gap, start, _MOVED))
        moved["offload"] = float((carried * share).sum())
        left = left - carried
    for name, seconds in moved.items():
        total[NAMES.index(name)] += seconds
    total[NAMES.index("bubble")] += float((left * share).sum())
    total += _tails(timeline, rank, end, weight, makespan)
    return dict(zip(NAMES, total.tolist()))


def _exchanging(
    timeline: Timeline, rank: np.ndarray, begin: np.ndarray, end: np.ndarray, queues: tuple[int, ...] = _DP
) -> np.ndarray:
    """Seconds of each interval [begin, end) in which the rank it is on had an exchange running, or what is on other
    queues."""
    out = np.zeros(len(rank))
    spans = np.flatnonzero(np.isin(timeline.queue, queues))
    spans = spans[np.argsort(timeline.start_s[spans], kind="stable")]
    for r in np.flatnonzero(np.bincount(rank)):
        mine, asked = spans[timeline.rank[spans] == r], rank == r
        if not len(mine):
            continue
        last = np.maximum.accumulate(timeline.end_s[mine])
        first = np.maximum(timeline.start_s[mine], np.append(0.0, last[:-1]))  # where the two queues overlap, once
        length = np.maximum(last - first, 0.0)
        before = np.cumsum(length) - length

        def busy_until(t: np.ndarray, first=first, length=length, before=before) -> np.ndarray:
            k = np.maximum(np.searchsorted(first, t, side="right") - 1, 0)
            return before[k] + np.clip(t - first[k], 0.0, length[k])

        out[asked] = busy_until(end[asked]) - busy_until(begin[asked])
    return out


def _tails(timeline: Timeline, rank: np.ndarray, end: np.ndarray, weight: np.ndarray, makespan: float) -> np.ndarray:
    """Time after a rank's last compute task: exchange that is still running there, or waiting for others."""
    out = np.zeros(len(NAMES))
    last, exchanged = np.zeros(len(weight)), np.zeros(len(weight))
    np.maximum.at(last, rank, end)
    exchange = np.isin(timeline.queue, _DP)
    np.maximum.at(exchanged, timeline.rank[exchange], timeline.end_s[exchange])
    tail = (makespan - last) * weight
    behind = exchanged >= makespan - 1e-12
    out[NAMES.index("dp")] = tail[behind].sum()
    moved = np.isin(timeline.queue, _MOVED)
    if moved.any():
        carried = np.zeros(len(weight))
        np.maximum.at(carried, timeline.rank[moved], timeline.end_s[moved])
        mine = (carried >= makespan - 1e-12) & ~behind
        out[NAMES.index("offload")] = tail[mine].sum()
        behind |= mine
    out[NAMES.index("bubble")] = tail[~behind].sum()
    return out
