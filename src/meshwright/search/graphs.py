"""The fastest plan for a model of a graph: every way of its partitions, or of its vertices and layers, predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import msgspec

from meshwright.answer.graph_network import NetworkPrediction, predict_graph_network
from meshwright.answer.node_embedding import NodePrediction, predict_node_embedding
from meshwright.answer.prediction import FORMAT_VERSION
from meshwright.cost import Costs
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.bucket_rules import bucket_violations
from meshwright.plan.facet import divisors
from meshwright.plan.facets import fields
from meshwright.plan.facets.buckets import BESIDE, GRID, HOST, LOCK, NVME, PEERS, TOURNAMENT, WAIT
from meshwright.plan.vertex_rules import vertex_violations
from meshwright.search.restrict import restricted
from meshwright.search.space import Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.edge_samples import EdgeSamples
from meshwright.spec.graph_epochs import GraphEpochs
from meshwright.spec.graphs import GraphModel, GraphNetwork

#: Partitions that are tried, those of all devices among them.
PARTITIONS = (1, 2, 4, 8, 16, 32)


class FoundGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a search: the ``best`` plans, those that fit first, by time; how many were ``evaluated``."""

    best: tuple[NodePrediction | NetworkPrediction, ...]
    evaluated: int

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return bool(self.best) and self.best[0].fits

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain values."""
        return {
            "format_version": FORMAT_VERSION,
            "fits": self.fits,
            "evaluated": self.evaluated,
            "best": [one.to_json() for one in self.best],
        }


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
) -> FoundGraph:
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
    check: Callable[[Plan], list[Diagnostic]]
    if whole:
        check = lambda plan: vertex_violations(plan, model, cluster)  # noqa: E731
    else:
        check = lambda plan: bucket_violations(plan, model, cluster, work)  # noqa: E731
    wrong = {text: check(plan) for text, plan in plans.items()}
    legal = [plan for text, plan in plans.items() if not wrong[text]]
    if not legal:
        raise MeshwrightError(min(wrong.values(), key=len))
    predict: Callable[..., Any] = predict_graph_network if whole else predict_node_embedding
    answers = [predict(model, cluster, work, plan, costs=costs) for plan in legal]
    answers.sort(key=lambda one: (not one.fits, one.total_s if one.fits else one.peak_memory_bytes))
    kept: list[Any] = []
    for one in answers:  # plans that differ in a word that changes nothing are one
        if not any((k.total_s, k.peak_memory_bytes) == (one.total_s, one.peak_memory_bytes) for k in kept):
            kept.append(one)
    return FoundGraph(best=tuple(kept[:top]), evaluated=len(answers))
