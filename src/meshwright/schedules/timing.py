"""Times of a schedule's actions: in-order execution under given durations. Fast in numba, plain in Python.

A rank does its actions one after the other and each starts as soon as what it needs is there:

* F of stage s needs F of stage s-1; B (or the full backward) of stage s needs its own F and the backward of
  stage s+1; W needs its B; all of the same microbatch.
* ``t_comm`` is a lag on the edge between two stages on different ranks. It delays the receiver and occupies
  no rank; stages on one rank hand over at once.
* A full backward takes t_b + t_w and hands its gradient on at its end.

Bubble, after Qi et al., 2023 (arXiv 2401.10241, section 5): (cost - work) / cost, where cost is the largest
over ranks of (last end - first start) and work is what a rank computes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from meshwright.errors import MeshwrightError
from meshwright.schedules.actions import LETTERS, Actions, F, W


def durations(actions: Actions, t_f: ArrayLike, t_b: ArrayLike, t_w: ArrayLike) -> np.ndarray:
    """Return the duration of each action, float64 [n], from scalars or one time per stage (any one unit)."""
    f, b, w = (np.broadcast_to(np.asarray(t, dtype=np.float64), actions.num_stages) for t in (t_f, t_b, t_w))
    return np.stack((f, b, w, b + w))[actions.kind, actions.stage]


def in_order_times(
    actions: Actions, t_f: ArrayLike, t_b: ArrayLike, t_w: ArrayLike, t_comm: ArrayLike = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every action, float64 [n] each, in the unit of the times.

    ``t_f``, ``t_b``, ``t_w``: scalars or [num_stages]. ``t_comm``: a scalar, or [num_stages - 1] with the lag
    between stages s and s+1 at s.

    Raises:
        MeshwrightError: S006 for every rank that waits for ever.
    """
    from meshwright.schedules.timing_loop import run_in_order

    comm = np.broadcast_to(np.asarray(t_comm, dtype=np.float64), max(actions.num_stages - 1, 0)).copy()
    start, end, place = run_in_order(actions, durations(actions, t_f, t_b, t_w), comm)
    if (place < actions.rank_ptr[1:]).any():
        from meshwright.schedules.verify import deadlocks

        raise MeshwrightError(deadlocks(actions, place))
    return start, end


def in_order_times_plain(
    actions: Actions, t_f: ArrayLike, t_b: ArrayLike, t_w: ArrayLike, t_comm: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end of every action, written for reading: the reference that `in_order_times` is held equal
    to. A scalar lag only."""
    length, n = durations(actions, t_f, t_b, t_w), len(actions)
    start, end = np.zeros(n), np.full(n, np.nan)
    at = {}
    for j, (k, s, i) in enumerate(zip(actions.kind.tolist(), actions.stage.tolist(), actions.microbatch.tolist())):
        at[LETTERS[k], s, i] = j
    rank = actions.rank_of()
    place, moved = actions.rank_ptr[:-1].copy(), True
    while moved:
        moved = False
        for r in range(actions.num_ranks):
            free = end[place[r] - 1] if place[r] > actions.rank_ptr[r] else 0.0
            while place[r] < actions.rank_ptr[r + 1]:
                j = int(place[r])
                k, s, i = int(actions.kind[j]), int(actions.stage[j]), int(actions.microbatch[j])
                if k == F:
                    needs = [("F", s - 1, i)] if s > 0 else []
                elif k == W:
                    needs = [("B", s, i)]
                else:
                    needs = [("F", s, i)] + ([("B", s + 1, i)] if s + 1 < actions.num_stages else [])
                befores = [at.get(need) for need in needs]
                if any(b is None or np.isnan(end[b]) for b in befores):
                    break
                start[j] = max([free] + [end[b] + (t_comm if rank[b] != r else 0.0) for b in befores])
                free = end[j] = start[j] + length[j]
                place[r] += 1
                moved = True
    return start, end


def cost(actions: Actions, start: np.ndarray, end: np.ndarray) -> float:
    """The longest a rank is busy or waiting between its first start and its last end."""
    first, last = actions.rank_ptr[:-1], actions.rank_ptr[1:] - 1
    return float((end[last] - start[first]).max())


def bubble_rate(actions: Actions, t_f: ArrayLike, t_b: ArrayLike, t_w: ArrayLike, t_comm: ArrayLike = 0.0) -> float:
    """The share of the time that a rank idles, 0 to 1; of the busiest rank where stages differ."""
    start, end = in_order_times(actions, t_f, t_b, t_w, t_comm)
    work = np.add.reduceat(end - start, actions.rank_ptr[:-1]).max()
    total = cost(actions, start, end)
    return float((total - work) / total)


def peak_in_flight(actions: Actions, keep_w: float = 1) -> np.ndarray:
    """The most activations each rank holds at once, [num_ranks], in units of one stage's activation of one
    microbatch. A backward to the inputs frees ``1 - keep_w``, its weight gradient the rest."""
    change = np.array([1, keep_w - 1, -keep_w, -1])[actions.kind]
    running = np.cumsum(change)
    first = actions.rank_ptr[:-1]
    return np.maximum.reduceat(running, first) - (running[first] - change[first])
