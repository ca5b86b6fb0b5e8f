"""Pass 9: memory. What each rank holds all the time, and what every pass allocates and frees."""

from __future__ import annotations

import numpy as np

from meshwright.graph import GraphBuilder
from meshwright.lower.exchange import Reduced
from meshwright.lower.stages import Stages
from meshwright.lower.state import gathered_bytes, static_bytes, unscattered_bytes
from meshwright.lower.step import Compute, rounds
from meshwright.schedules.actions import BW, Actions, B, F, W

#: Gradients of a stage that accumulate whole until its round ends.
IN_FLIGHT = "gradients in flight"
#: What a microbatch leaves in a stage, as :class:`~meshwright.lower.state.Activations` counts it.
KEPT = ("saved", "held", "working", "logits")
#: What the loss keeps of the scores over the vocabulary.
LOGITS = "logits"


def add_memory(
    builder: GraphBuilder, orders: list[Actions], stages: Stages, computes: list[Compute], reduced: Reduced
) -> tuple[dict[str, float], ...]:
    """Adds activation and workspace events to every pass; returns the constant bytes of each rank class by category.

    A forward allocates what its backward needs. A full backward frees it; a split one frees all but what the
    weight gradient needs, which W frees. Where gradients are scattered after rounds, a round's first weight gradient
    allocates its stage's whole, and every reduction frees what it has scattered.
    """
    distinct = {id(c): c for c in stages.compositions}
    known = {key: stages.activations(c) for key, c in distinct.items()}
    kept = [known[id(c)] for c in stages.compositions]
    saved, held, working, logits = (np.array([getattr(a, f) for a in kept]) for f in KEPT)
    saved = saved - logits
    losing = logits > 0
    split = bool(np.any(orders[0].kind == W))
    for index, (actions, compute) in enumerate(zip(orders, computes)):
        rank = actions.rank_of()
        starts = np.searchsorted(compute.action, np.arange(len(actions)))
        ends = np.append(starts[1:], len(compute.action)) - 1
        first, last = compute.task[starts], compute.task[ends]
        where = index * stages.plan.layout.pp + rank
        for kind in (F, B, W, BW):
            at = np.flatnonzero(actions.kind == kind)
            if not len(at):
                continue
            stage = actions.stage[at]
            if kind == F:
                builder.memory(first[at], where[at], False, saved[stage], "activations")
            elif kind == W:
                builder.memory(last[at], where[at], True, -held[stage], "activations")
            else:
                after = held[stage] if split and kind == B else 0.0
                builder.memory(last[at], where[at], True, after - saved[stage], "activations")
            losses = at[losing[stage]] if kind != W else at[:0]
            if len(losses):
                task, sign = (first, 1.0) if kind == F else (last, -1.0)
                builder.memory(task[losses], where[losses], kind != F, sign * logits[actions.stage[losses]], LOGITS)
            builder.memory(first[at], where[at], False, working[stage], "workspace")
            builder.memory(last[at], where[at], True, -working[stage], "workspace")
        if stages.plan.layout.pp > 1 and stages.plan.layout.shards_gradients:
            begins = np.flatnonzero(rounds(actions)[0])
            whole = np.array(
                [unscattered_bytes(stages.plan, stages.total_params(c.units)) for c in stages.compositions]
            )
            builder.memory(first[begins], where[begins], False, whole[actions.stage[begins]], IN_FLIGHT)
            freed = np.array([unscattered_bytes(stages.plan, stages.total_params(units)) for units in reduced.units])
            builder.memory(reduced.task, index * stages.plan.layout.pp + reduced.rank, True, -freed, IN_FLIGHT)
    return constant_bytes(stages, orders[0]) * len(computes)


def constant_bytes(stages: Stages, actions: Actions) -> tuple[dict[str, float], ...]:
    """Constant bytes of every pipeline rank by category: the state of the stages it holds, and ZeRO-3's gathered
    copies."""
    held: list[list[int]] = [[] for _ in range(stages.plan.layout.pp)]
    for stage, ranks in enumerate(actions.stage_ranks):
        for rank in ranks:
            held[rank].append(stage)
    known: dict[tuple[int, ...], dict[str, float]] = {}  # equal stages are one object
    each: dict[int, dict[str, float]] = {}
    for composition in stages.compositions:
        if id(composition) not in each:
            each[id(composition)] = static_bytes(stages.plan, stages.train, stages.total_params(composition.units))
    out = []
    for mine in held:
        same = tuple(id(stages.compositions[s]) for s in mine)
        if same not in known:
            known[same] = _static(stages, mine, each)
        out.append(known[same])
    return tuple(out)


def _static(stages: Stages, held: list[int], each: dict[int, dict[str, float]]) -> dict[str, float]:
    plan = stages.plan
    out: dict[str, float] = {}
    gathered = 0.0
    for stage in held:
        composition = stages.compositions[stage]
        for name, size in each[id(composition)].items():
            out[name] = out.get(name, 0.0) + size
        if plan.layout.zero == 3:
            parts = [gathered_bytes(plan, stages.total_params(s), stages.train) for s in composition.segments]
            # without a pipeline two layers are gathered at a time; under one the stage stays gathered
            gathered += sum(sorted(parts)[-2:]) if plan.layout.pp == 1 else sum(parts)
    if gathered:
        out["gathered parameters"] = gathered
    if plan.layout.shards_gradients and plan.layout.pp == 1:
        # the layer in flight has its gradient whole until it is scattered
        segments = [s for stage in held for s in stages.compositions[stage].segments]
        out["gradients"] += max(unscattered_bytes(plan, stages.total_params(s)) for s in segments)
    return out
