"""The fastest plan for a model of a graph: every way of its partitions, or of its vertices and layers, predicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.answer.graph_network import predict_graph_network
from meshwright.answer.node_embedding import predict_node_embedding
from meshwright.cost import Costs
from meshwright.errors import Diagnostic
from meshwright.plan import Plan
from meshwright.plan.bucket_rules import bucket_violations
from meshwright.plan.facet import divisors
from meshwright.plan.facets.buckets import BESIDE, GRID, HOST, LOCK, NVME, PEERS, TOURNAMENT, WAIT
from meshwright.plan.vertex_rules import vertex_violations
from meshwright.search.listed import FoundPlans, Report, best_of, plan_of, quiet, values_of
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
    report: Report = quiet,
    **limits: Iterable[str],
) -> FoundPlans:
    """Predict every legal plan of the space, and return the `top` best. `limits` are the restrictions of
    :func:`~meshwright.search.listed.values_of`; `report` as :func:`.best_of` takes it.

    Raises:
        MeshwrightError: R001 to R005 for restrictions; P084 or P085 where no plan is legal, with the reasons of the
            plainest.
    """
    devices, whole = cluster.num_devices, isinstance(model, GraphNetwork)
    plans = (plan_of(values, devices) for values in values_of(_space(model, devices), **limits))
    texts = {plan.text(): plan for plan in plans if plan is not None}

    def check(plan: Plan) -> list[Diagnostic]:
        return vertex_violations(plan, model, cluster) if whole else bucket_violations(plan, model, cluster, work)

    def predict(plan: Plan) -> Any:
        found = predict_graph_network if whole else predict_node_embedding
        return found(model, cluster, work, plan, costs=costs)

    told = {"top": top, "alike": True, "report": report}
    return best_of(texts.values(), check=check, predict=predict, seconds=lambda one: one.total_s, **told)
