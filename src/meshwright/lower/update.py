"""The end of a step: copies of one weight added up, the gradient norm, the optimizer, parameters gathered after it."""

from __future__ import annotations

import numpy as np

from meshwright.graph import KIND, GraphBuilder
from meshwright.lower.averages import add_averages
from meshwright.lower.compute import Compute
from meshwright.lower.exchange import Reduced
from meshwright.lower.facts import Facts
from meshwright.lower.roles import (
    CodeRole,
    ExchangeRole,
    MeasureRole,
    NormRole,
    Roles,
    SlopesRole,
    TwinRole,
    UpdateRole,
)
from meshwright.lower.tiers import Tiered, add_host_updates
from meshwright.lower.units import Unit
from meshwright.schedules.actions import Actions
from meshwright.sync.fragments import FOLDED, GATHERED, REFRESHED


def held_units(facts: Facts, actions: Actions) -> list[tuple[Unit, ...]]:
    """The layers of every pipeline rank, stage after stage; equal ones are one object."""
    same: dict[tuple[Unit, ...], tuple[Unit, ...]] = {}
    out = []
    for rank in range(facts.pp):
        held = [s for s, ranks in enumerate(actions.stage_ranks) if rank in ranks]
        units = tuple(u for s in held for u in facts.compositions[s].units)
        out.append(same.setdefault(units, units))
    return out


def add_update(
    builder: GraphBuilder,
    roles: Roles,
    facts: Facts,
    actions: Actions,
    computes: list[Compute],
    reduced: Reduced,
    tiered: Tiered,
) -> None:
    """Add the twins' sums, what decodes gradients, the norm, every rank's optimizer, the average of replicas that step
    apart, and the gather that nothing else hides."""
    _add_twins(builder, roles, facts, actions, computes)
    pp = facts.pp
    decoded = _add_decodes(builder, roles, facts, actions, reduced) if facts.encoded else {}
    if facts.scoped and not facts.overlap_dp:
        decoded = _add_folds(builder, roles, facts, actions, computes, reduced)
    norms = _add_norms(builder, roles, facts, computes, decoded)
    if facts.layerwise:
        norms = _add_measures(builder, roles, facts, actions, norms)
    late = facts.exchanges and facts.zero >= 1 and not facts.gathers_ahead
    for r, units in enumerate(held_units(facts, actions)):
        where = 0 if facts.alike else r
        updates: list[tuple[int, np.ndarray]] = []  # with the class of slices that they are of
        if facts.offload is not None and facts.offload.optimizer:
            units, moved = _divided(facts, actions, r)
            for index, norm in enumerate(norms):
                ends = add_host_updates(builder, roles, facts, moved, index, r, norm, tiered.gradients[index, r])
                updates += [(index, end) for end in ends]
        for index in range(len(computes) if units else 0):
            stream = builder.stream(index * pp + r, "compute")
            # where layers are updated within the backward, what the host does at the end of a step is left
            role = roles(UpdateRole(() if facts.early else units, index, where))
            updates.append((index, builder.extend(KIND["optimizer"], role, stream=[stream])))
            builder.depend(updates[-1][1], norms[index])
        if facts.averages:
            own = [update for _, update in updates]
            updates = list(enumerate(add_averages(builder, roles, facts, actions, computes, r, own)))
        if late or facts.scoped:
            what = REFRESHED if facts.scoped else GATHERED
            gather = builder.extend(KIND["all_gather"], roles(ExchangeRole(what, units, where)))
            for index in dict(updates):
                builder.occupy(gather, [builder.stream(index * pp + r, "dp_gather")])
            for _, update in updates:
                builder.depend(gather, update)


def _divided(facts: Facts, actions: Actions, rank: int) -> tuple[tuple[Unit, ...], list[tuple[int, int]]]:
    """The layers of a pipeline rank that its device updates, and the segments that its host does."""
    own: list[Unit] = []
    moved = []
    for stage, ranks in enumerate(actions.stage_ranks):
        segments = facts.compositions[stage].segments if rank in ranks else ()
        count = facts.offload.moved("optimizer", len(segments))
        moved += [(stage, i) for i in range(count)]
        own += [unit for some in segments[count:] for unit in some]
    return tuple(own), moved


def add_projected(builder: GraphBuilder, roles: Roles, facts: Facts, actions: Actions, computes: list[Compute]) -> None:
    """Add the exchange of slopes, and the steps along all directions on every rank."""
    slopes = builder.extend(KIND["all_gather"], roles(SlopesRole()))
    held = held_units(facts, actions)
    for index, compute in enumerate(computes):
        for r, units in enumerate(held):
            builder.occupy(slopes, [builder.stream(index * facts.pp + r, "dp")])
            builder.depend(slopes, [compute.done[r]])
            role = roles(UpdateRole(units, index, 0 if facts.alike else r))
            update = builder.extend(KIND["optimizer"], role, stream=[builder.stream(index * facts.pp + r, "compute")])
            builder.depend(update, slopes)


def _add_norms(
    builder: GraphBuilder,
    roles: Roles,
    facts: Facts,
    computes: list[Compute],
    decoded: dict[tuple[int, int], np.ndarray],
) -> list[np.ndarray]:
    """The norm of each class of slices: one of all, or, where replicas step apart, one each."""
    joined = [[i] for i in range(len(computes))] if facts.apart else [list(range(len(computes)))]
    out = []
    for some in joined:
        norm = builder.extend(KIND["all_reduce"], roles(NormRole(0 if facts.alike else some[0])))
        for index in some:
            for r in range(facts.pp):
                builder.occupy(norm, [builder.stream(index * facts.pp + r, "dp")])
                builder.depend(norm, decoded.get((index, r), [computes[index].done[r]]))
            out.append(norm)
    return out


def _add_measures(
    builder: GraphBuilder, roles: Roles, facts: Facts, actions: Actions, after: list[np.ndarray]
) -> list[np.ndarray]:
    """The norms of matrices, taken by every pipeline rank and then summed over those that step together; the sum of
    each class of slices."""
    held, done = held_units(facts, actions), []
    for index, norm in enumerate(after):
        mine = []
        for r, units in enumerate(held):
            stream = builder.stream(index * facts.pp + r, "compute")
            role = roles(MeasureRole(units, index, 0 if facts.alike else r))
            mine.append(builder.extend(KIND["optimizer"], role, stream=[stream]))
            builder.depend(mine[-1], norm)
        done.append(mine)
    joined = [[i] for i in range(len(after))] if facts.apart else [list(range(len(after)))]
    out = []
    for some in joined:
        total = builder.extend(KIND["all_reduce"], roles(MeasureRole((), 0 if facts.alike else some[0])))
        for index in some:
            for r in range(facts.pp):
                builder.occupy(total, [builder.stream(index * facts.pp + r, "dp")])
                builder.depend(total, done[index][r])
            out.append(total)
    return out


def _add_decodes(
    builder: GraphBuilder, roles: Roles, facts: Facts, actions: Actions, reduced: Reduced
) -> dict[tuple[int, int], np.ndarray]:
    """The decoding of all gradients of a pipeline rank, once they are exchanged, by class of slices and rank."""
    out = {}
    for r, units in enumerate(held_units(facts, actions)):
        if all(u.plain for u in units):
            continue
        arrived = reduced.task[reduced.rank == r]
        for index in range(len(facts.counts)):
            stream = builder.stream(index * facts.pp + r, "compute")
            role = roles(CodeRole("decode", units, index, 0 if facts.alike else r))
            task = out[index, r] = builder.extend(KIND["optimizer"], role, stream=[stream])
            builder.depend(np.broadcast_to(task, arrived.shape), arrived)
    return out


def _add_folds(
    builder: GraphBuilder, roles: Roles, facts: Facts, actions: Actions, computes: list[Compute], reduced: Reduced
) -> dict[tuple[int, int], np.ndarray]:
    """Sums of a step scattered on over the optimizer's scope, once all microbatches are in them, by class of slices
    and rank."""
    out = {}
    for r, units in enumerate(held_units(facts, actions)):
        fold = builder.extend(KIND["reduce_scatter"], roles(ExchangeRole(FOLDED, units, 0 if facts.alike else r)))
        arrived = reduced.task[reduced.rank == r]
        builder.depend(np.broadcast_to(fold, arrived.shape), arrived)
        for index, compute in enumerate(computes):
            builder.occupy(fold, [builder.stream(index * facts.pp + r, "dp")])
            builder.depend(fold, [compute.done[r]])
            out[index, r] = fold
    return out


def _add_twins(builder: GraphBuilder, roles: Roles, facts: Facts, actions: Actions, computes: list[Compute]) -> None:
    """Copies of one weight on two ranks of a pipeline are summed: a stage that runs in both directions, and a
    tied embedding whose head is on another rank."""
    twins = [
        (tuple(ranks), facts.compositions[stage].units)
        for stage, ranks in enumerate(actions.stage_ranks)
        if len(ranks) == 2
    ]
    if facts.tied:
        twins.append(((actions.stage_ranks[0][0], actions.stage_ranks[-1][-1]), ()))
    if facts.borrowed >= 0 and actions.stage_ranks[0][0] != actions.stage_ranks[facts.borrowed][0]:
        twins.append(((actions.stage_ranks[0][0], actions.stage_ranks[facts.borrowed][0]), ()))
    for (a, b), units in twins:
        for index, compute in enumerate(computes):
            ids = builder.extend(KIND["all_reduce"], roles(TwinRole(units, index, (a, b))), stage=0)
            for r in (a, b):
                builder.occupy(ids, [builder.stream(index * facts.pp + r, "dp")])
                builder.depend(ids, [compute.done[r]])
