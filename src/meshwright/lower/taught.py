"""Public text in a step: predicted before a replica's own passes, and learnt from what neighbours predict behind them,
so that predictions travel beside those (``sync/taught.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from meshwright.graph import KIND, GraphBuilder
from meshwright.lower.compute import Compute
from meshwright.lower.facts import Facts
from meshwright.lower.roles import PassRole, PredictionsRole, Roles
from meshwright.lower.stages import Stages
from meshwright.spec.architecture import HEAD
from meshwright.sync.fragments import predictions
from meshwright.sync.groups import most_heard
from meshwright.sync.policy import read
from meshwright.sync.rounds import turns_of
from meshwright.work import Elementwise

if TYPE_CHECKING:
    from meshwright.lower.program import Program
    from meshwright.sync.fragments import Fragment


def add_public(builder: GraphBuilder, roles: Roles, facts: Facts) -> list[np.ndarray]:
    """Add the forward of public text, with all heads, to every class of slices; its tasks."""
    out = []
    for index, count in enumerate(facts.counts if facts.taught is not None else ()):
        stream, role = builder.stream(index, "compute"), roles(PassRole("F", facts.taught.units, index, 0))
        said = {"stage": 0, "chunk": 0, "microbatch": count}
        out.append(builder.extend(KIND["F"], role, stream=[stream], **said))
    return out


def add_lessons(
    builder: GraphBuilder, roles: Roles, facts: Facts, computes: list[Compute], public: list[np.ndarray]
) -> list[np.ndarray]:
    """Add the messages of predictions, and behind a replica's own passes the backward of public text: of all but the
    main head, which learns nothing there. Return its tasks; they are the last of every replica's passes."""
    if not public:
        return []
    said = {"stage": 0, "microbatch": facts.counts[0]}
    sent = [builder.extend(KIND["neighbours"], roles(PredictionsRole(turn)), **said) for turn in range(facts.turns)]
    first = next(i for i, unit in enumerate(facts.taught.units) if unit.kind == HEAD)
    learns = facts.taught.units[:first] + facts.taught.units[first + 1 :]
    out = []
    for index, (count, compute, made) in enumerate(zip(facts.counts, computes, public)):
        for one in sent:  # of others in each turn
            builder.occupy(one, [builder.stream(index, "dp")])
            builder.depend(one, made)
        stream, role = builder.stream(index, "compute"), roles(PassRole("BW", learns, index, 0))
        out.append(builder.extend(KIND["BW"], role, stream=[stream], stage=0, chunk=0, microbatch=count))
        for one in sent:
            builder.depend(out[-1], one)
        compute.done = out[-1]
    return out


def message_bytes(stages: Stages) -> int:
    """Bytes of a replica's predictions of a microbatch of public text."""
    taught, c = read(stages.plan.sync.policy).taught, stages.context()
    return taught.message_bytes(c.tokens, stages.model.vocab, stages.model.hidden, int(c.element))


def predictions_bytes(stages: Stages) -> int:
    """Bytes of the predictions that a replica sends and of those that it hears."""
    policy, layout = read(stages.plan.sync.policy), stages.plan.layout
    return message_bytes(stages) * (1 + most_heard(policy.group, layout.dp))


def told(stages: Stages) -> Fragment:
    """Return what a replica sends to its neighbours: its predictions."""
    return predictions(stages.plan, read(stages.plan.sync.policy), message_bytes(stages))


def predicted(program: Program, stages: Stages, turn: int) -> Program:
    """The messages of predictions to the neighbours of a turn, and the work on both their ends: log-probabilities of
    every head written, those that are heard read for the surest and for its probabilities."""
    policy, size = read(stages.plan.sync.policy), message_bytes(stages)
    c, heard = stages.context(), max((move.group.fan for move in program.moves), default=0.0)
    made = c.tokens * stages.model.vocab * policy.taught.heads * (4.0 + 3 * c.element)
    work = Elementwise(num_bytes=made + 3 * heard * size, kernels=6 * policy.taught.heads, fused=True)
    every = turns_of(policy, stages.plan.layout.dp)
    return msgspec.structs.replace(program, work=work, every=every, part=turn)
