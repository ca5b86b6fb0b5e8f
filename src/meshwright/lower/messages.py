"""Messages between stages: a task on the sender's queue, or a plain edge where both stages are on one rank. Where the
output's error enters every stage, it is what is sent in place of gradients, by the last stage to all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.graph import KIND, GraphBuilder
from meshwright.lower.compute import Compute
from meshwright.lower.facts import Facts
from meshwright.lower.roles import MessageRole, Roles
from meshwright.schedules.actions import Actions
from meshwright.schedules.errors_out import error_messages


class ErrorsArrived(NamedTuple):
    """Messages that bring a rank the output's error of a microbatch, [messages] each."""

    task: np.ndarray = np.empty(0, np.int64)
    rank: np.ndarray = np.empty(0, np.int64)
    microbatch: np.ndarray = np.empty(0, np.int64)


def add_messages(
    builder: GraphBuilder, roles: Roles, facts: Facts, actions: Actions, compute: Compute, index: int
) -> ErrorsArrived:
    """Activations to the next stage, gradients back: a task on the sender's queue, or a plain edge on one rank.

    Without overlap the sender's next action waits until its message is out, as a blocking send does. Returns the errors
    that ranks get.
    """
    if actions.num_stages == 1:
        return ErrorsArrived()
    pp, home = facts.pp, compute.home
    borders = np.array(facts.first_layers, np.int64) * facts.several
    following = np.append(compute.task[1:], -1)
    following[np.flatnonzero(np.diff(actions.rank_of()[compute.action]))] = -1
    for (first, last), source, target, queue in (
        (compute.forward, slice(None, -1), slice(1, None), "pp_forward"),
        (compute.backward, slice(1, None), slice(None, -1), "pp_backward"),
    ):
        if queue == "pp_backward" and (facts.frozen or facts.direct):
            break
        producer, consumer = last[source].ravel(), first[target].ravel()
        a, b = home[source].ravel(), home[target].ravel()
        local = a == b
        builder.depend(consumer[local], producer[local])
        order = np.flatnonzero(~local)[np.argsort(producer[~local], kind="stable")]
        producer, consumer, a, b = producer[order], consumer[order], a[order], b[order]
        later = np.broadcast_to(borders[1:, None], (len(borders) - 1, home.shape[1])).ravel()[order]
        pair, back = np.unique(later * pp**2 + a * pp + b, return_inverse=True)
        sent = [roles(MessageRole(index, *divmod(v % pp**2, pp), v // pp**2)) for v in pair.tolist()]
        pair %= pp**2
        streams = [builder.stream(index * pp + v // pp, queue) for v in pair.tolist()]
        stage = np.broadcast_to(np.arange(actions.num_stages)[:, None], home.shape)[source].ravel()[order]
        microbatch = np.broadcast_to(np.arange(actions.num_microbatches)[None, :], home.shape)[source].ravel()[order]
        if not len(pair):
            continue
        ids = builder.extend(
            KIND["send"], np.array(sent)[back], stream=np.array(streams)[back], stage=stage, microbatch=microbatch
        )
        builder.depend(ids, producer)
        builder.depend(consumer, ids)
        if not facts.overlap_pp:
            blocked = following[producer - compute.task[0]]
            builder.depend(blocked[blocked >= 0], ids[blocked >= 0])
    return _add_errors(builder, roles, facts, actions, compute, index, following) if facts.direct else ErrorsArrived()


def _add_errors(
    builder: GraphBuilder,
    roles: Roles,
    facts: Facts,
    actions: Actions,
    compute: Compute,
    index: int,
    following: np.ndarray,
) -> ErrorsArrived:
    """The output's error from the last stage's forward, which its loss ends, to every stage's backward."""
    pp, home, sent = facts.pp, compute.home, error_messages(actions, compute.home)
    made = compute.forward[1][-1]
    place = np.broadcast_to(made, (pp, len(made))).copy()  # [ranks, microbatches]: who has the error there
    if len(sent.target):
        pair, back = np.unique(sent.source * pp + sent.target, return_inverse=True)
        numbers = np.array([roles(MessageRole(index, *divmod(v, pp))) for v in pair.tolist()])
        streams = np.array([builder.stream(index * pp + v // pp, "pp_backward") for v in pair.tolist()])
        ids = builder.extend(
            KIND["send"], numbers[back], stream=streams[back], stage=sent.stage + 1, microbatch=sent.microbatch
        )
        builder.depend(ids, made[sent.microbatch])
        place[sent.target, sent.microbatch] = ids
        if not facts.overlap_pp:
            blocked = following[made[sent.microbatch] - compute.task[0]]
            builder.depend(blocked[blocked >= 0], ids[blocked >= 0])
        found = ErrorsArrived(task=ids, rank=sent.target, microbatch=sent.microbatch)
    else:
        found = ErrorsArrived()
    builder.depend(compute.backward[0].ravel(), place[home, np.arange(home.shape[1])].ravel())
    return found
