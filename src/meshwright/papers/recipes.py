"""Recipes that depend on the plan they are put over: functions from (plan, model, cluster, train) to a plan.

A recipe does not ask whether its plan is legal; what is wrong with it is said by the plan's own rules.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from meshwright.plan import Pipeline, Plan, check
from meshwright.plan.text import over
from meshwright.search.evaluate import Evaluator
from meshwright.search.settle import stages_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

Function = Callable[[Plan, Model, Cluster, Train], Plan]


def split_backward(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """2BP over the plan's schedule."""
    name = plan.pipeline.schedule
    return plan if name.startswith("2bp:") else over(plan, f"2bp:{name} vpp{plan.pipeline.vpp}")


def interleave(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """Two chunks a rank, or the fewest that are legal; two when none is."""
    ways = [over(plan, f"interleaved vpp{chunks}") for chunks in range(2, 1 + model.num_layers // plan.layout.pp)]
    return next((way for way in ways if not check(way, model, cluster, train)), over(plan, "interleaved vpp2"))


def relieve_the_last_stage(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """Layers per stage by the partition that makes the slowest stage fastest."""
    stages = stages_of(plan, Evaluator(model, cluster, train))
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, stages=stages))


def overlap_gradients(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """Overlap the exchange of gradients with the backward; other overlaps stay as they are."""
    return msgspec.structs.replace(plan, overlap=msgspec.structs.replace(plan.overlap, dp=True))


def scope_each_kind_of_state(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """Weights sharded over two neighbours, gradients over the replicas that share a node, the optimizer's states over
    all; the ranks of a pipeline's stages are replicas, as every rank has a part of every layer."""
    layout, replicas = plan.layout, plan.layout.dp * plan.layout.pp
    here = max(2, cluster.islands[0].node.devices // layout.tp)
    layout = msgspec.structs.replace(layout, pp=1, dp=replicas, zero=3, shard=0, scopes=(2, min(here, replicas)))
    return msgspec.structs.replace(plan, layout=layout, pipeline=Pipeline(microbatch=plan.pipeline.microbatch))


def tensor_parallel_inside_the_node(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """The most tensor parallelism that a node and the model's heads allow, on as many devices as before."""
    total, layout = plan.layout.num_ranks, plan.layout
    for tp in range(cluster.islands[0].node.devices, 0, -1):
        rest = tp * layout.pp * layout.cp
        if total % rest:
            continue
        tried = msgspec.structs.replace(plan, layout=msgspec.structs.replace(layout, tp=tp, dp=total // rest))
        if not check(tried, model, cluster, train):
            return tried
    return plan


def regroup_experts(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """Experts over as many of the plan's ranks as there are experts, or the most that is legal."""
    experts = max((mixture.experts for mixture in model.mixtures), default=2)
    ways = [
        msgspec.structs.replace(plan, experts=msgspec.structs.replace(plan.experts, ep=ep, etp=0))
        for ep in range(experts, 1, -1)
    ]
    return next((way for way in ways if not check(way, model, cluster, train)), ways[-1])


def two_axes_of_a_sequence(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
    """As many ranks as share a node and a model's heads allow swap heads, inside a ring over the others; all of them
    swap where the node holds the whole of context parallelism."""
    cp, here = plan.layout.cp, max(1, cluster.islands[0].node.devices // plan.layout.tp)
    ways = [{"algorithm": "ulysses", "ulysses": 1}] if cp <= here else []
    ways += [{"algorithm": "ring", "ulysses": n} for n in range(min(here, cp - 1), 1, -1) if cp % n == 0]
    for way in ways:
        tried = msgspec.structs.replace(plan, sequence=msgspec.structs.replace(plan.sequence, **way))
        if not check(tried, model, cluster, train):
            return tried
    return plan


def stepping_apart(word: str) -> Function:
    """Return the recipe that has replicas step apart, as the word ``sync=`` says it, between groups that shard what the
    plan shards: as large as share a node, or none where no group is legal."""

    def recipe(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
        layout, here = plan.layout, max(1, cluster.islands[0].node.devices // plan.layout.tp)
        data, way = layout.dp * layout.cp, over(plan, f"sync={word}")
        if not layout.zero or layout.shard:
            return way
        ways = [_laid_out(way, zero=layout.zero, shard=n) for n in _scopes(data, here)] + [_laid_out(way, zero=0)]
        return next((w for w in ways if not check(w, model, cluster, train)), ways[-1])

    return recipe


def encoded_gradients(word: str) -> Function:
    """Return the recipe that exchanges gradients in a codec, as the word ``sync=`` says it: between groups as large as
    share a node where the plan shards state, and by replicas in place of tensor parallelism where the plan has that."""

    def recipe(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Plan:
        way, here, layout = over(plan, f"sync={word}"), max(1, cluster.islands[0].node.devices), plan.layout
        ways = []
        for shape in ({}, {"tp": 1, "dp": layout.dp * layout.tp, "sp": False}):
            data = shape.get("dp", layout.dp) * layout.cp
            scoped = [{"zero": 1, "shard": n} for n in _scopes(data, here)] if layout.zero else []
            ways += [_laid_out(way, **shape, **more) for more in (*scoped, {"zero": 0, "shard": 0})]
        return next((w for w in ways if not check(w, model, cluster, train)), ways[0])

    return recipe


def _scopes(data: int, here: int) -> list[int]:
    """Sharding scopes of several groups among `data` ranks, the largest first, inside a node of so many."""
    return [n for n in range(min(here, data // 2), 1, -1) if data % n == 0]


def _laid_out(plan: Plan, **changed: int) -> Plan:
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, **changed))


RECIPES: dict[str, Function] = {
    "encode_by_powersgd": encoded_gradients("powersgd:rank=4"),
    "sums_by_links": encoded_gradients("dedloc"),
    "encode_by_terngrad": encoded_gradients("terngrad"),
    "encode_by_dynamic8": encoded_gradients("dynamic8"),
    "encode_where_faster": encoded_gradients("espresso:codec=dgc"),
    "split_backward": split_backward,
    "interleave": interleave,
    "relieve_the_last_stage": relieve_the_last_stage,
    "overlap_gradients": overlap_gradients,
    "scope_each_kind_of_state": scope_each_kind_of_state,
    "tensor_parallel_inside_the_node": tensor_parallel_inside_the_node,
    "regroup_experts": regroup_experts,
    "two_axes_of_a_sequence": two_axes_of_a_sequence,
    "rounds_of_local_steps": stepping_apart("diloco:h=500"),
    "experts_on_clusters": stepping_apart("ddm"),
    "neighbours_beside_the_step": stepping_apart("gossip:graph=exponential,overlap=yes"),
}
