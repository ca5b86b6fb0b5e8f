"""Where the time goes: each rank's step split by cause, averaged over ranks, summing to the step time.

A compute task's time is split as its cost key is. Idle time of the compute queue is charged to what the next
task waited for: data-parallel exchange, the message itself, or other stages (the bubble).
"""

from __future__ import annotations

import numpy as np

from meshwright.graph import QUEUE
from meshwright.simulate.layer import CAUSES
from meshwright.timeline import Timeline

NAMES = (*CAUSES, "bubble")
_DP = (QUEUE["dp"], QUEUE["dp_gather"])
_PP = (QUEUE["pp_forward"], QUEUE["pp_backward"])


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
    total[: len(CAUSES)] = by_key @ parts
    new_rank = np.append(True, rank[1:] != rank[:-1])
    gap = start - np.where(new_rank, 0.0, np.append(0.0, end[:-1]))
    late = timeline.waited_for[spans]
    # A collective that waited for the slowest rank was only in flight for its own length; the rest is waiting.
    flight = np.where(late >= 0, np.minimum(gap, timeline.end_s[late] - timeline.start_s[late]), 0.0)
    queue = np.where(late >= 0, timeline.queue[late], -1)
    moved = {
        name: float((flight * share)[(queue == first) | (queue == second)].sum())
        for name, (first, second) in {"dp": _DP, "pp": _PP}.items()
    }
    for name, seconds in moved.items():
        total[NAMES.index(name)] += seconds
    total[NAMES.index("bubble")] += float((gap * share).sum()) - sum(moved.values())
    total += _tails(timeline, rank, end, weight, makespan)
    return dict(zip(NAMES, total.tolist()))


def _tails(timeline: Timeline, rank: np.ndarray, end: np.ndarray, weight: np.ndarray, makespan: float) -> np.ndarray:
    """Time after a rank's last compute task: exchange that is still running there, or waiting for others."""
    out = np.zeros(len(NAMES))
    last, exchanged = np.zeros(len(weight)), np.zeros(len(weight))
    np.maximum.at(last, rank, end)
    exchange = (timeline.queue == _DP[0]) | (timeline.queue == _DP[1])
    np.maximum.at(exchanged, timeline.rank[exchange], timeline.end_s[exchange])
    tail = (makespan - last) * weight
    behind = exchanged >= makespan - 1e-12
    out[NAMES.index("dp")] = tail[behind].sum()
    out[NAMES.index("bubble")] = tail[~behind].sum()
    return out
