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
    total = np.zeros(len(NAMES))
    makespan, weight = timeline.makespan_s, sum(timeline.multiplicity)
    for rank, count in enumerate(timeline.multiplicity):
        total += count / weight * _of_rank(timeline, parts, rank, makespan)
    return dict(zip(NAMES, total.tolist()))


def _of_rank(timeline: Timeline, parts: np.ndarray, rank: int, makespan: float) -> np.ndarray:
    out = np.zeros(len(NAMES))
    spans = timeline.of_rank(rank)
    out[: len(CAUSES)] = parts[timeline.cost_key[spans]].sum(axis=0)
    start, end = timeline.start_s[spans], timeline.end_s[spans]
    gaps = start - np.concatenate([[0.0], end[:-1]])
    late = timeline.waited_for[spans]
    waited_queue = np.where(late >= 0, timeline.queue[late], -1)
    length = np.where(late >= 0, timeline.end_s[late] - timeline.start_s[late], 0.0)
    dp = np.isin(waited_queue, _DP)
    pp = np.isin(waited_queue, _PP)
    # A collective that waited for the slowest rank was only in flight for its own length; the rest is waiting.
    flight = np.minimum(gaps, length)
    out[NAMES.index("dp")] += flight[dp].sum()
    out[NAMES.index("pp")] += flight[pp].sum()
    out[NAMES.index("bubble")] += gaps.sum() - flight[dp].sum() - flight[pp].sum()
    tail = makespan - (end[-1] if len(end) else 0.0)
    mine = (timeline.rank == rank) & np.isin(timeline.queue, _DP)
    behind = timeline.end_s[mine].max(initial=0.0) >= makespan - 1e-12
    out[NAMES.index("dp" if behind else "bubble")] += tail
    return out
