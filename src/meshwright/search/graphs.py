"""The fastest plan for a model of a graph: every way of its partitions, or of its vertices and layers, predicted."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import msgspec

from meshwright.answer.graph_network import predict_graph_network
from meshwright.answer.node_embedding import predict_node_embedding
from meshwright.cost import Costs
from meshwright.errors import Diagnostic
from meshwright.plan import Plan
from meshwright.plan.bucket_rules import bucket_violations
from meshwright.plan.facet import divisors
from meshwright.plan.facets import fields
from meshwright.plan.facets.buckets import BESIDE, GRID, HOST, LOCK, NVME, PEERS, TOURNAMENT, WAIT
from meshwright.plan.vertex_rules import vertex_violations
from meshwright.search.listed import FoundPlans, best_of
from meshwright.search.restrict import restricted
from meshwright.search.space import Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graph_epochs import GraphEpochs
from meshwright.spec.graphs import GraphModel, GraphNetwork

#: Partitions that are tried, those of all devices among them.
PARTITIONS = (1, 2, 4, 8, 16, 32)


def _space(model: GraphModel, devices: int) -> dict[str, tuple[Any, ...]]:
    """Facets that are searched, and the values of each. Chunks of vertices, whose late neighbours are old ones, are
    tried where they are allowed."""
    if isinstance(model, GraphNetwork):
        stages = tuple(d for d in divisors(devices) if d <= model.layers)
        return {"pp": stages, "schedule": ("gpipe", "1f1b"), "vertex_chunks": (1,)}
    partitions = tuple(sorted({*PARTITIONS, devices, 2 * devices}))
    return {
        "partitions": partitions,
        "buckets": (GRID, LOCK) if model.context else (LOCK, TOURNAMENT),
        "idle": (HOST, NVME, PEERS),
        "swap": (WAIT, BESIDE),
        "episode": (0,),
        "samplers": (0,),
    }


def find_graph(
    model: GraphModel,
    cluster: Cluster,
    work: EdgeSamples | GraphEpochs,
    *,
    costs: Costs | None = None,
    top: int = 5,
    fix: Iterable[str] = (),
    bound: Iterable[str] = (),
    exclude: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> FoundPlans:
    """Predict every legal plan of the space under the restrictions, and return the `top` best.

    Raises:
        MeshwrightError: R001 to R005 for restrictions; P084 or P085 where no plan is legal, with the reasons of the
            plainest.
    """
    first = _space(model, cluster.num_devices)
    forms = {name: fields()[name].form for name in first}
    space = restricted(Space(domains=first), fix=fix, bound=bound, exclude=exclude, allow=allow, forms=forms)
    whole = isinstance(model, GraphNetwork)
    plans: dict[str, Plan] = {}
    for values in product(*(space[name] or () for name in first)):
        plan = Plan()
        for name, value in zip(first, values):
            field = fields()[name]
            record = msgspec.structs.replace(getattr(plan, field.facet), **field.sets(value))
            plan = msgspec.structs.replace(plan, **{field.facet: record})
        plan = plan.on(cluster.num_devices)
        if plan.layout.pp == 1 or plan.layout.pp * plan.layout.dp == cluster.num_devices:
            plans[plan.text()] = plan

    def check(plan: Plan) -> list[Diagnostic]:
        return vertex_violations(plan, model, cluster) if whole else bucket_violations(plan, model, cluster, work)

    def predict(plan: Plan) -> Any:
        found = predict_graph_network if whole else predict_node_embedding
        return found(model, cluster, work, plan, costs=costs)

    return best_of(plans.values(), check=check, predict=predict, seconds=lambda one: one.total_s, top=top, alike=True)
