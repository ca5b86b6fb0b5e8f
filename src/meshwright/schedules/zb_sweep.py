"""One greedy construction of a zero-bubble schedule under given times and memory: the compiled inner loop.

After the heuristic of Qi et al., 2023 (arXiv 2401.10241, section 3.1): sweep the pipeline once per microbatch,
forwards down the ranks and backwards up, and put weight gradients where a rank would wait or lacks memory.
`search_zb` runs it under many settings and keeps the best.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from meshwright.schedules.actions import B, F, W

# Rows of a sweep's state: how many F, B and W each rank has run, and its clock, activations held and time idled.
CLOCK, HELD, IDLE = 3, 4, 5


@njit(cache=True)
def _put(kind, r, time, keep_w, state, end, order):
    """Run the next F, B or W of rank r at the earliest time. ``time`` is [4, p]: t_f, t_b, t_w, t_comm."""
    i = int(state[kind, r])
    begin = state[CLOCK, r]
    if kind == F and r > 0:
        begin = max(begin, end[F, r - 1, i] + time[3, r])
    elif kind == B and r + 1 < end.shape[1]:
        begin = max(begin, end[B, r + 1, i] + time[3, r])
    if state[F, r] > 0:
        state[IDLE, r] += begin - state[CLOCK, r]
    order[r, int(state[F, r] + state[B, r] + state[W, r])] = kind
    state[kind, r] += 1
    state[CLOCK, r] = begin + time[kind, r]
    if kind == W:
        state[HELD, r] -= keep_w
    else:
        end[kind, r, i] = state[CLOCK, r]
        state[HELD, r] += 1.0 if kind == F else keep_w - 1.0


@njit(cache=True)
def _fill(r, arrival, need, limit, fill, time, keep_w, state, end, order):
    """Weight gradients on rank r before work that arrives at `arrival` and needs `need` activations.

    First until the memory is there, then as many as fit in the wait. One more, overrunning the wait, when the wait
    is longer than what the worst rank idles more than this one, or than `fill` weight gradients.
    """
    while state[HELD, r] + need > limit + 1e-9 and state[W, r] < state[B, r]:
        _put(W, r, time, keep_w, state, end, order)
    while state[W, r] < state[B, r] and state[CLOCK, r] + time[W, r] <= arrival:
        _put(W, r, time, keep_w, state, end, order)
    wait = arrival - state[CLOCK, r]
    if wait > 0 and state[W, r] < state[B, r]:
        if wait > fill * time[W, r] or wait > state[IDLE].max() - state[IDLE, r]:
            _put(W, r, time, keep_w, state, end, order)


@njit(cache=True)
def _warm_up(early, m, limit, time, keep_w, state, end, order):
    """The first forward everywhere, then as many as fit before the first backward arrives, fewer down the ranks."""
    p = len(limit)
    for r in range(p):
        _put(F, r, time, keep_w, state, end, order)
    more = np.zeros(p, dtype=np.int64)
    arrival = state[CLOCK, p - 1] + time[B, p - 1]
    for r in range(p - 2, -1, -1):
        arrival += time[3, r]
        at = state[CLOCK, r]
        while 1 + more[r] < m and more[r] + 2.0 <= limit[r] + 1e-9:
            if at + max(early, 0.0) * time[F, r] > arrival or (early < 0 and at == arrival):
                break
            at += time[F, r]
            more[r] += 1
        arrival = max(at, arrival) + time[B, r]
    for r in range(1, p):
        # As many as the rank before only where that rank has run them all.
        more[r] = min(more[r], more[r - 1] if more[r - 1] + 1 == m else max(more[r - 1] - 1, 0))
    for r in range(p):
        for _ in range(more[r]):
            _put(F, r, time, keep_w, state, end, order)
    for r in range(p - 1, -1, -1):
        _put(B, r, time, keep_w, state, end, order)


@njit(cache=True)
def _wants_forward(r, limit, time, keep_w, state):
    """False when rank r had better run no forward this turn: the next rank is two behind and would not miss it."""
    if r + 1 == len(limit) or state[F, r] < state[F, r + 1] + 2:
        return True
    needed = state[CLOCK, r + 1] + time[F, r + 1] + time[B, r + 1] + time[3, r]
    if state[CLOCK, r] >= needed:
        return False
    at = state[CLOCK, r] + time[F, r]
    after, owed = state[HELD, r] + 1.0, state[B, r] - state[W, r]
    while after > limit[r] + 1e-9 and owed > 0:
        at += time[W, r]
        after -= keep_w
        owed -= 1
    return at <= needed or needed - state[CLOCK, r] > state[IDLE].max() - state[IDLE, r]


@njit(cache=True)
def sweep(time, m, limit, keep_w, early, patient, fill_f, fill_b, bound):
    """(cost, order): the cost as in `timing.cost` and the kinds of each rank's actions, uint8 [p, 3 m], where
    microbatches go in order within a kind. Gives up, with an infinite cost, once `bound` cannot be beaten.

    ``time`` float64 [4, p]: t_f, t_b, t_w and t_comm of each rank; ``limit`` float64 [p], 1 or more activations;
    ``keep_w`` is the share of an activation that stays from B until W. No rank runs more forwards than the one
    before it, so a turn that needs a forward always has it, and after its weight gradients a rank holds less than
    its warm-up did.
    """
    p = len(limit)
    state, end = np.zeros((6, p)), np.zeros((2, p, m))
    order = np.zeros((p, 3 * m), dtype=np.uint8)
    work = m * (time[F] + time[B] + time[W])
    _warm_up(early, m, limit, time, keep_w, state, end, order)
    run = np.zeros(p, dtype=np.bool_)
    for i in range(1, m):
        for r in range(p):
            run[r] = state[F, r] < m and (not patient or _wants_forward(r, limit, time, keep_w, state))
        for r in range(p - 2, -1, -1):
            run[r] = run[r] and run[r + 1]
        for r in range(p):
            if run[r]:
                arrival = end[F, r - 1, int(state[F, r])] + time[3, r] if r > 0 else 0.0
                _fill(r, arrival, 1.0, limit[r], fill_f, time, keep_w, state, end, order)
                _put(F, r, time, keep_w, state, end, order)
        for r in range(p - 1, -1, -1):
            arrival = end[B, r + 1, i] + time[3, r] if r + 1 < p else 0.0
            _fill(r, arrival, keep_w - 1.0, limit[r], fill_b, time, keep_w, state, end, order)
            while r == 0 and state[F, 0] == m and state[W, 0] < state[B, 0]:
                _put(W, 0, time, keep_w, state, end, order)
            _put(B, r, time, keep_w, state, end, order)
        if (work + state[IDLE]).max() >= bound:
            return np.inf, order
    for r in range(p):
        order[r, int(state[F, r] + state[B, r] + state[W, r]) :] = W
    return (work + state[IDLE]).max(), order
