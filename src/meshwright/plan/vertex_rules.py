"""Rules of a plan for a graph network, whose vertices and layers are divided over devices."""

from __future__ import annotations

from meshwright.errors import Diagnostic
from meshwright.plan.bucket_rules import of_others
from meshwright.plan.facet import wrong
from meshwright.plan.record import Plan
from meshwright.schedules import get
from meshwright.spec.cluster import Cluster
from meshwright.spec.graphs import GraphNetwork

#: Words of other models' plans that say something of a graph network too.
KEPT = ("dp", "pp", "schedule")


def vertex_violations(plan: Plan, model: GraphNetwork, cluster: Cluster) -> list[Diagnostic]:
    """Return all violations of a plan with ``dp`` filled in: P085 for words of other models, and for layers, chunks and
    devices that do not go together."""
    found = layout_violations(plan, model)
    return found if plan.several else [*found, *_of_cluster(plan, cluster)]


def layout_violations(plan: Plan, model: GraphNetwork) -> list[Diagnostic]:
    """Return what is wrong with a plan's words, layers and chunks on any devices."""
    if plan.several:
        return [wrong("P085", "a graph network is trained by a plan of one pool", "pools", "say one pool")]
    why = "vertices are divided by dp, layers by pp, and chunks of the graph pass them"
    found = of_others(plan, model.name, "vertices", "P085", why, keep=KEPT)
    if found:
        return found
    layout, chunks = plan.layout, plan.vertices.vertex_chunks
    if layout.pp > model.layers:
        message = f"pp={layout.pp} stages of {model.layers} layers"
        found.append(wrong("P085", message, f"layout.pp = {layout.pp}", f"say pp{model.layers} at most"))
    if layout.pp == 1 and chunks > 1:
        message = f"vertex_chunks={chunks} pass the stages of a pipeline, and there is one"
        found.append(wrong("P085", message, "vertices.vertex_chunks", "say pp2, or drop it"))
    if chunks * layout.dp > model.vertices:
        message = f"vertex_chunks={chunks} on dp={layout.dp} of {model.vertices:,} vertices"
        found.append(wrong("P085", message, "vertices.vertex_chunks", "say fewer chunks"))
    family = get(plan.pipeline.schedule)
    if layout.pp > 1 and (family.placement != "linear" or family.splits_backward):
        message = f"{plan.pipeline.schedule}: chunks of a graph pass one stage a rank, with whole backwards"
        found.append(wrong("P085", message, "pipeline.schedule", "say gpipe or 1f1b"))
    return found


def _of_cluster(plan: Plan, cluster: Cluster) -> list[Diagnostic]:
    layout, found = plan.layout, []
    if layout.pp * layout.dp != cluster.num_devices:
        message = f"pp={layout.pp} x dp={layout.dp} on {cluster.num_devices} devices"
        found.append(wrong("P085", message, "layout", "leave dp out, and say a pp that divides them"))
    device, why = cluster.islands[0].device, ""
    if len(cluster.islands) > 1:
        why = "its islands have unequal devices, and a graph is divided over equal ones"
    elif device.cores:
        why = "its ranks share processor cores, which is not priced for graphs"
    elif "fp32" not in device.peak_flops:
        why = "its devices do not multiply in fp32"
    if why:
        place, message = f"--on {cluster.name}", f"{cluster.name}: {why}"
        found.append(Diagnostic(code="P085", message=message, place=place, help="ask about one kind of device"))
    return found
