"""Paths through a schedule: linear functions of the stages' times that no execution of it can beat.

The makespan of a schedule is the longest path through its dependencies (see ``schedules/timing.py``), so every path is
a lower bound, whatever the times are. Two kinds are kept for each schedule: the longest path under times that are
typical for the question, and for every rank the chain to its first action, all its work, and the chain back.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numba import njit

from meshwright.lower.step import rounds
from meshwright.schedules.actions import BW, Actions, B, F, W
from meshwright.schedules.timing import in_order_times, peak_in_flight

#: Shares of an activation that stay until the weight gradient, for which the most in flight is worked out.
KEPT = (0.0, 0.25, 0.5, 0.75, 1.0)


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of counts for one schedule of S stages.

    ``passes`` [rows, 3, S]: how often a row goes through F, the backward (or B alone, where ``split``) and W of each
    stage; ``sends`` [rows]: messages between ranks on it. ``in_flight`` [levels, ranks]: activations a rank holds
    at most, when the share :data:`KEPT` of one stays from B to W. ``held`` [ranks, S]: 1 where a rank holds a stage.
    ``stage_ranks`` the same as a list. ``split``: backwards come as B and W. ``rounds`` [ranks, S]: how often a rank
    accumulates a stage's gradients without another between.
    """

    passes: np.ndarray
    sends: np.ndarray
    in_flight: np.ndarray
    held: np.ndarray
    split: bool
    rounds: np.ndarray
    stage_ranks: tuple[tuple[int, ...], ...]

    def of_any_order(self) -> Paths:
        """What holds whatever order the ranks choose: their work and the chains to it, one activation each."""
        return msgspec.structs.replace(
            self,
            passes=self.passes[1:],
            sends=self.sends[1:],
            in_flight=np.minimum(self.in_flight[:1], 1.0),
            rounds=np.minimum(self.rounds, 1.0),
        )


def paths(actions: Actions, forward: np.ndarray, backward: np.ndarray, weight: np.ndarray, send: float) -> Paths:
    """The rows of a schedule under typical seconds of each stage [S]; `backward` is the input gradient's."""
    split = bool(np.any(actions.kind == W))
    start, end = in_order_times(actions, forward, backward, weight, send)
    longest, sent = _longest(
        actions.rank_ptr,
        actions.kind,
        actions.stage,
        actions.microbatch,
        start,
        end,
        actions.num_stages,
        actions.num_microbatches,
        send,
    )
    held = np.zeros((actions.num_ranks, actions.num_stages))
    for stage, ranks in enumerate(actions.stage_ranks):
        held[list(ranks), stage] = 1.0
    work, chain = _work(actions, held, split)
    return Paths(
        passes=np.concatenate([longest[None], work]),
        sends=np.concatenate([[sent], chain]),
        in_flight=np.array([peak_in_flight(actions, share) for share in (KEPT if split else KEPT[:1])]),
        held=held,
        split=split,
        rounds=_rounds(actions),
        stage_ranks=actions.stage_ranks,
    )


def _rounds(actions: Actions) -> np.ndarray:
    begins = rounds(actions)[0]
    out = np.zeros((actions.num_ranks, actions.num_stages))
    np.add.at(out, (actions.rank_of()[begins], actions.stage[begins]), 1.0)
    return out


def _work(actions: Actions, held: np.ndarray, split: bool) -> tuple[np.ndarray, np.ndarray]:
    """For every rank: forwards down to its first stage, its own actions, full backwards up from it."""
    num_ranks, num_stages = held.shape
    rank = actions.rank_of()
    kind = np.where(actions.kind == BW, B, actions.kind)
    rows = np.zeros((num_ranks, 3, num_stages))
    np.add.at(rows, (rank, kind, actions.stage), 1.0)
    chain = np.zeros(num_ranks)
    if any(len(r) > 1 for r in actions.stage_ranks):
        return rows, chain  # microbatches come from both ends
    first = held.argmax(axis=1)
    for r in range(num_ranks):
        rows[r, F, : first[r]] += 1.0
        owners = [ranks[0] for ranks in actions.stage_ranks[: first[r] + 1]]
        crossings = sum(a != b for a, b in pairwise(owners))
        chain[r] = crossings
        if not split:
            rows[r, B, : first[r]] += 1.0
            chain[r] += crossings
    return rows, chain


@njit(cache=True)
def _longest(rank_ptr, kind, stage, microbatch, start, end, num_stages, num_microbatches, lag):
    """Counts [3, S] of the passes on the path that ends last, followed back, and the messages on it."""
    n = len(kind)
    at = np.full((3, num_stages, num_microbatches), -1, np.int64)
    rank = np.empty(n, np.int64)
    for r in range(len(rank_ptr) - 1):
        for i in range(rank_ptr[r], rank_ptr[r + 1]):
            rank[i] = r
            at[1 if kind[i] == 3 else kind[i], stage[i], microbatch[i]] = i
    counts, sends = np.zeros((3, num_stages)), 0
    i = int(np.argmax(end))
    while i >= 0:
        s, m, k = stage[i], microbatch[i], kind[i]
        counts[1 if k == 3 else k, s] += 1
        best, latest, sent = -1, -1.0, 0
        if i > rank_ptr[rank[i]]:
            best, latest = i - 1, end[i - 1]
        for choice in range(2):
            j = -1
            if k == 0 and choice == 0 and s > 0:
                j = at[0, s - 1, m]
            elif k == 2 and choice == 0:
                j = at[1, s, m]
            elif k == 1 or k == 3:
                if choice == 0:
                    j = at[0, s, m]
                elif s + 1 < num_stages:
                    j = at[1, s + 1, m]
            if j >= 0:
                crosses = 1 if rank[j] != rank[i] else 0
                if end[j] + crosses * lag > latest:
                    best, latest, sent = j, end[j] + crosses * lag, crosses
        sends += sent
        i = best
    return counts, sends
