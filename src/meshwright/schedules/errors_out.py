"""Messages of direct feedback: the output's error goes from the last stage to every rank that has a stage, once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.schedules.actions import Actions, F


class ErrorMessages(NamedTuple):
    """Messages in the order in which they are sent, [messages] each: the ``microbatch`` whose error it is, the pipeline
    ranks it goes from (``source``) and to (``target``), and the last ``stage`` that is there."""

    microbatch: np.ndarray
    source: np.ndarray
    target: np.ndarray
    stage: np.ndarray


def error_messages(actions: Actions, home: np.ndarray) -> ErrorMessages:
    """Return who sends whom the error of the last stage's microbatches, each behind its forward and to near stages
    first; `home` [S, microbatches] is the rank of every stage's passes."""
    num_stages, num_microbatches = home.shape
    each = np.arange(num_microbatches)
    stage = np.full((actions.num_ranks, num_microbatches), -1)
    for s in range(num_stages):
        stage[home[s], each] = s
    stage[home[-1], each] = -1  # it is there
    made = np.zeros(num_microbatches, np.int64)
    last = np.flatnonzero((actions.kind == F) & (actions.stage == num_stages - 1))
    made[actions.microbatch[last]] = last
    target, microbatch = np.nonzero(stage >= 0)
    order = np.lexsort((-stage[target, microbatch], made[microbatch]))
    target, microbatch = target[order], microbatch[order]
    return ErrorMessages(microbatch, home[-1, microbatch], target, stage[target, microbatch])
