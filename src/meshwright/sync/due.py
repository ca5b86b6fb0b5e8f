"""Due times of fragments, in the order that a schedule runs its passes."""

from __future__ import annotations

import numpy as np

from meshwright.schedules.actions import BW, Actions, W
from meshwright.sync.fragments import PASS, ROUND


def due_after(actions: Actions, due: str) -> np.ndarray:
    """The passes after which gradients are exchanged, bool [actions]: every weight gradient where they are due after a
    ``pass``, the last of every round, else the last of every (rank, stage).

    A round is as many weight gradients of one stage as a rank computes without another stage between them: the stage's
    gradients accumulate whole for so long, then they are scattered and their memory is free for the next stage. Llama
    3 shards gradients under its pipeline (2407.21783, section 3.3.2); scattering them after rounds, of as many
    microbatches as an interleaved schedule gives a chunk at a time, is the least communication that does so. One stage
    a rank is one round a step, ZeRO-1 in other words.
    """
    grads = (actions.kind == W) | (actions.kind == BW)
    if due == PASS:
        return grads
    return rounds(actions)[1] if due == ROUND else last_of(actions, grads)


def rounds(actions: Actions) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last pass of every round (see :func:`due_after`), bool [actions] each."""
    chosen = np.flatnonzero((actions.kind == W) | (actions.kind == BW))
    place = actions.rank_of()[chosen].astype(np.int64) * actions.num_stages + actions.stage[chosen]
    new = np.append(True, place[1:] != place[:-1])
    first, last = np.zeros(len(actions), bool), np.zeros(len(actions), bool)
    first[chosen[new]] = True
    last[chosen[np.append(new[1:], True)]] = True
    return first, last


def first_of(actions: Actions, among: np.ndarray) -> np.ndarray:
    """The first of the chosen actions for every (rank, stage)."""
    return _one_of(actions, np.flatnonzero(among))


def last_of(actions: Actions, among: np.ndarray) -> np.ndarray:
    """The last of the chosen actions for every (rank, stage)."""
    return _one_of(actions, np.flatnonzero(among)[::-1])


def _one_of(actions: Actions, chosen: np.ndarray) -> np.ndarray:
    """The first of `chosen`, in their order, for every (rank, stage), bool [actions]."""
    place = actions.rank_of()[chosen].astype(np.int64) * actions.num_stages + actions.stage[chosen]
    out = np.zeros(len(actions), bool)
    out[chosen[np.unique(place, return_index=True)[1]]] = True
    return out
