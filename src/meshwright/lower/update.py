"""The end of a step: copies of one weight added up, the gradient norm, the optimizer, parameters gathered after it."""

from __future__ import annotations

from meshwright.graph import KIND, GraphBuilder
from meshwright.lower.compute import Compute
from meshwright.lower.facts import Facts
from meshwright.lower.roles import ExchangeRole, NormRole, Roles, TwinRole, UpdateRole
from meshwright.lower.units import Unit
from meshwright.schedules.actions import Actions


def held_units(facts: Facts, actions: Actions) -> list[tuple[Unit, ...]]:
    """The layers of every pipeline rank, stage after stage; equal ones are one object."""
    same: dict[tuple[Unit, ...], tuple[Unit, ...]] = {}
    out = []
    for rank in range(facts.pp):
        held = [s for s, ranks in enumerate(actions.stage_ranks) if rank in ranks]
        units = tuple(u for s in held for u in facts.compositions[s].units)
        out.append(same.setdefault(units, units))
    return out


def add_update(builder: GraphBuilder, roles: Roles, facts: Facts, actions: Actions, computes: list[Compute]) -> None:
    """Add the twins' sums, the norm, every rank's optimizer and the gather that nothing else hides."""
    _add_twins(builder, roles, facts, actions, computes)
    pp = facts.pp
    norm = builder.extend(KIND["all_reduce"], roles(NormRole()))
    for index, compute in enumerate(computes):
        for r in range(pp):
            builder.occupy(norm, [builder.stream(index * pp + r, "dp")])
            builder.depend(norm, [compute.done[r]])
    late = facts.exchanges and facts.zero in (1, 2) and not facts.overlap_dp
    for r, units in enumerate(held_units(facts, actions)):
        where = 0 if facts.alike else r
        updates = []
        for index in range(len(computes)):
            stream = builder.stream(index * pp + r, "compute")
            role = roles(UpdateRole(units, index, where))
            updates.append(builder.extend(KIND["optimizer"], role, stream=[stream]))
            builder.depend(updates[-1], norm)
        if late:
            gather = builder.extend(KIND["all_gather"], roles(ExchangeRole("gather", units, where)))
            for index, update in enumerate(updates):
                builder.occupy(gather, [builder.stream(index * pp + r, "dp_gather")])
                builder.depend(gather, update)


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
