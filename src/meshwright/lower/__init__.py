"""Lowering: a plan becomes a task graph. :func:`lower` is the ordered list of its passes.

The structure of the graph comes first and is shared by all plans of equal facts; binding then says what each task of it
does for this plan. ``simulate/`` prices the programs and runs the clock.
"""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright import schedules
from meshwright.graph import TaskGraph
from meshwright.lower.bind import Binder, bound
from meshwright.lower.facts import Facts, facts_of
from meshwright.lower.known import Known
from meshwright.lower.place import Mesh
from meshwright.lower.pools import PoolStages, joined, placed
from meshwright.lower.pools import bound as bound_pools
from meshwright.lower.program import LayerPass, Program
from meshwright.lower.residency import constant_bytes
from meshwright.lower.stages import Stages
from meshwright.lower.structure import Structure, drafted, finished, structure
from meshwright.plan import Plan
from meshwright.plan.filling import num_frozen, trained_part, without_frozen
from meshwright.plan.pool import Elsewhere
from meshwright.schedules.actions import Actions
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


class Lowered(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's step graph: ``programs[i]`` is what tasks of cost key i do. ``actions`` are those of the first class of
    slices; others differ in the number of microbatches at most.

    Of a plan of ``several`` pools each is one more, with the graph of all, its own programs, and the rank classes from
    ``first`` on, on devices from ``begin`` on; the whole has a mesh of all devices in a row, and neither stages nor
    actions. ``filled`` are frozen layers that every rank runs in its waits (``filling.py``).
    """

    graph: TaskGraph
    programs: tuple[Program, ...]
    mesh: Mesh
    stages: Stages
    actions: Actions
    static_bytes: tuple[dict[str, float], ...]
    first: int = 0
    begin: int = 0
    several: tuple[Lowered, ...] = ()
    filled: Stages | None = None

    @property
    def parts(self) -> tuple[Lowered, ...]:
        """The pools: itself where it is one."""
        return self.several or (self,)

    @property
    def pool(self) -> str:
        """The name of its pool; "" where it is the only one."""
        return self.graph.streams.ranks[self.first].pool

    @property
    def num_ranks(self) -> int:
        """Ranks of all pools, which wait for one another in a step."""
        return sum(rank.multiplicity for rank in self.graph.streams.ranks)

    @property
    def plan(self) -> Plan:
        """The plan of the only pool."""
        return self.stages.plan

    @property
    def layer_passes(self) -> tuple[LayerPass, ...]:
        """The distinct passes over layers, in the order in which programs hold them."""
        return tuple(dict.fromkeys(one for program in self.programs for one in program.layers))


def lower(
    plan: Plan,
    model: Model,
    cluster: Cluster,
    train: Train,
    schedule_params: dict[str, object] | None = None,
    *,
    bucket_bytes: int = 0,
) -> Lowered:
    """The step graph of a legal plan, one rank class per pipeline rank and slice class. `schedule_params` go to the
    schedule's builder (the times a zero-bubble search is made for). Unsharded gradients are reduced in buckets of
    `bucket_bytes` (0: whole).

    Raises:
        MeshwrightError: G001 when the schedule's order deadlocks, G002 when a pass broke the graph's rules.
    """
    if plan.several:
        return bind_pools(plan, placed(plan, model, cluster, train), model, cluster, bucket_bytes)
    if num_frozen(plan, model):  # of the layers that are trained: waits are known once these are priced
        plan, model = without_frozen(plan), trained_part(plan, model)
    mesh = Mesh(plan, cluster)  # axes onto levels: groups and rank classes
    stages = Stages(plan, model, train, mesh)  # layers to stages, stages to pieces
    return bind(structured(stages, schedule_params), stages, bucket_bytes)


def order(plan: Plan, count: int, params: dict[str, object]) -> Actions:
    """The actions of the plan's schedule for so many microbatches."""
    return schedules.build(plan.pipeline.schedule, plan.layout.pp, count, plan.pipeline.vpp, **params)


def structured(
    stages: Stages,
    schedule_params: dict[str, object] | None = None,
    known: dict[Facts, Structure] | None = None,
) -> Structure:
    """The structure of a plan's step: one of those `known` (the last few of all), but where the schedule is made for
    the plan's own times."""
    facts = facts_of(stages, schedule_params)
    if schedule_params:
        return finished(drafted(facts))
    if known is None:
        return structure(facts)
    found = known.get(facts)
    if found is None:
        found = known[facts] = finished(drafted(facts))
    return found


def bind(structure: Structure, stages: Stages, bucket_bytes: int = 0) -> Lowered:
    """A structure with the programs and bytes of one plan, whose stages these are."""
    graph, programs = bound(structure, Binder(stages, stages.mesh, bucket_bytes))
    return Lowered(
        graph=graph,
        programs=programs,
        mesh=stages.mesh,
        stages=stages,
        actions=structure.actions,
        static_bytes=constant_bytes(stages, structure.actions),
    )


def bind_pools(
    plan: Plan, pools: tuple[PoolStages, ...], model: Model, cluster: Cluster, bucket_bytes: int = 0
) -> Lowered:
    """The step graph of a legal plan of several pools, on devices that are known."""
    found = bound_pools(joined(pools, plan), pools, model, cluster, bucket_bytes)
    parts, first = [], 0
    for i, pool in enumerate(pools):
        parts.append(
            Lowered(
                graph=found.graph,
                programs=found.own[i],
                mesh=pool.stages.mesh,
                stages=pool.stages,
                actions=found.actions[i],
                static_bytes=found.static_bytes[i],
                first=first,
                begin=pool.begin,
            )
        )
        first += len(found.static_bytes[i])
    nowhere: Any = Elsewhere(tuple(one.pool.name for one in pools))
    return Lowered(
        graph=found.graph,
        programs=found.programs,
        mesh=found.mesh,
        stages=nowhere,
        actions=nowhere,
        static_bytes=tuple(one for part in parts for one in part.static_bytes),
        several=tuple(parts),
    )


__all__ = ["Known", "Lowered", "bind", "bind_pools", "lower", "order", "structured"]
