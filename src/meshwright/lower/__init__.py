"""Lowering: a plan becomes a task graph. :func:`lower` is the ordered list of its passes.

What comes out is structure alone; ``simulate/`` prices the cost keys and runs the clock.
"""

from __future__ import annotations

import msgspec

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.graph import GraphBuilder, TaskGraph
from meshwright.lower.exchange import Exchanger
from meshwright.lower.place import Mesh
from meshwright.lower.residency import add_memory
from meshwright.lower.stages import Stages
from meshwright.lower.step import Key, Tables, add_compute, add_sends, gathers_again, verify
from meshwright.plan import Plan
from meshwright.schedules.actions import Actions
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


class Lowered(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's step graph with what its cost keys mean: ``keys[i]`` is the item behind ``graph.keys[i]``. ``actions``
    are those of the first kind of slices; others differ in the number of microbatches at most."""

    graph: TaskGraph
    keys: tuple[Key, ...]
    mesh: Mesh
    stages: Stages
    actions: Actions
    static_bytes: tuple[dict[str, float], ...]


def lower(
    plan: Plan, model: Model, cluster: Cluster, train: Train, schedule_params: dict[str, object] | None = None
) -> Lowered:
    """The step graph of a legal plan, one rank class per pipeline rank and slice class. `schedule_params` go to the
    schedule's builder (the times a zero-bubble search is made for).

    Raises:
        MeshwrightError: G001 when the schedule's order deadlocks, G002 when a pass broke the graph's rules.
    """
    plan = _as_executed(plan, cluster)
    mesh = Mesh(plan, cluster)  # 1. axes onto levels: groups and rank classes
    stages = Stages(plan, model, train, mesh)  # 2-4. layers to stages, stages to pieces
    params = schedule_params or {}
    counts = plan.layout.shares or [plan.num_microbatches(train.global_batch)] * len(mesh.slices)
    orders = [order(plan, count, params) for count in counts]  # 5. the schedule's actions
    builder = GraphBuilder(*_rank_classes(mesh, plan))
    tables = Tables(builder)
    computes = []
    for index, actions in enumerate(orders):
        compute = add_compute(builder, tables, actions, stages, mesh, index)  # 6. passes over stages
        add_sends(builder, tables, actions, stages, mesh, index, compute)  # 7. between stages
        computes.append(compute)
    reduced = Exchanger(builder, tables, orders, stages, mesh).add(computes)  # 8. between replicas, and the optimizer
    static = add_memory(builder, orders, stages, computes, reduced)  # 9. what each task allocates and frees
    graph = builder.build()  # 10. topological order
    broken = verify(graph)
    if broken:
        raise MeshwrightError.one("G002", "the lowered graph breaks its own rules: " + "; ".join(broken))
    return Lowered(
        graph=graph,
        keys=tuple(tables.keys),
        mesh=mesh,
        stages=stages,
        actions=orders[0],
        static_bytes=static,
    )


def _as_executed(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the overlap that there can be: torch's fully sharded layers ask for parameters and reduce gradients
    by calls that return when it is done, which only a device that is handed its work ahead of time does not feel."""
    if gathers_again(plan.layout) and cluster.islands[0].device.synchronous:
        return msgspec.structs.replace(plan, overlap=msgspec.structs.replace(plan.overlap, dp=False))
    return plan


def order(plan: Plan, count: int, params: dict[str, object]) -> Actions:
    """The actions of the plan's schedule for so many microbatches."""
    return schedules.build(plan.pipeline.schedule, plan.layout.pp, count, plan.pipeline.vpp, **params)


def _rank_classes(mesh: Mesh, plan: Plan) -> tuple[list[str], list[int]]:
    names, counts = [], []
    per_slice = plan.layout.tp * plan.layout.cp
    for index, slice_ in enumerate(mesh.slices):
        for r in range(plan.layout.pp):
            where = f"rank {r}" if len(mesh.slices) == 1 else f"slice {index} rank {r} ({slice_.devices[r].name})"
            names.append(where)
            counts.append(per_slice * slice_.multiplicity)
    return names, counts
