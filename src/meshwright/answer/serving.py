"""Predict a serving workload: check, price iterations, simulate requests, and say why. The whole flow is
:func:`predict_serving`."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from meshwright.answer.beside import JOBS_APART, SharedReplicas, beside_bytes, cannot_share
from meshwright.answer.block_places import ZooPlaces, cannot_cut, roomy
from meshwright.answer.fairness import fairness, group_metrics
from meshwright.answer.governed import GovernedReplicas
from meshwright.answer.latency import objectives_kept, query_summary, serving_metrics, with_intervals
from meshwright.answer.lending import Lenders, cannot_lend
from meshwright.answer.pairing import PairedReplicas, cannot_pair
from meshwright.answer.peer_places import cannot_chain
from meshwright.answer.power import PoweredReplicas, beyond_supply, cannot_power
from meshwright.answer.replica import built, padded, served_by
from meshwright.answer.serving_answer import ServingPrediction
from meshwright.answer.serving_check import oversized, refused, unshared
from meshwright.answer.serving_peers import predict_peers
from meshwright.answer.serving_pools import predict_pools
from meshwright.answer.serving_why import (
    assumptions,
    attribution,
    identity,
    replicas_over_time,
    warnings,
    without_room,
)
from meshwright.answer.usage import usage
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan.facets.overlap import otherwise
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.served import Replica
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests, nobody
from meshwright.spec.serve import Serve
from meshwright.spec.serve_values import AUTO_BUDGET
from meshwright.timeline import Timeline


def predict_serving(
    model: Model,
    cluster: Cluster,
    serve: Serve,
    plan: Plan,
    *,
    requests: Requests | None = None,
    costs: Costs | None = None,
    profile: EngineProfile | None = None,
    detail: bool = True,
    tables: dict[Hashable, IterationCosts] | None = None,
) -> ServingPrediction:
    """Latency, throughput, memory and their reasons for a serving workload under `plan`.

    `requests` are those of the workload where they were drawn before, `profile` an engine in place of the one that the
    workload names. Without `detail` there are no intervals. `tables` keeps prices for other plans of the same question.

    Raises:
        MeshwrightError: every violation at once: W012 requests longer than the context or the cache, W013 an unknown
            policy, W014 a plan or model that serving does not take, and the P codes of the plan.
    """
    plan = plan.on(cluster.num_devices)
    if requests is None:
        serve = serve.for_context(model.max_seq_len)
        requests = serve.drawn()
    found = refused(plan, model, cluster, serve) + oversized(model, requests, serve.engine) + unshared(plan, requests)
    found += cannot_lend(plan, model, serve)
    found += cannot_pair(plan, serve)
    found += cannot_share(plan, cluster, serve)
    found += cannot_power(plan, cluster, serve)
    found += cannot_cut(plan, model, serve)
    found += cannot_chain(plan, cluster, model, serve)
    if found:
        raise MeshwrightError(found)
    profile = profile or engine_profile(serve.engine.profile)
    costs = costs or serving_costs(profile.library)
    if plan.several:
        return predict_pools(model, cluster, serve, plan, requests, costs, profile, detail=detail, tables=tables)
    if serve.engine.peers is not None:
        asked = (model, cluster, serve, plan, requests, roomy(serve, requests), costs, profile)
        return predict_peers(*asked, detail=detail)
    if plan.serving.padded:
        requests = padded(requests, serve.batch or serve.engine.max_batch)
    taken = beside_bytes(serve, cluster)
    cut = serve.engine.zoo is not None
    whole = msgspec.structs.replace(requests, adapter=nobody()) if cut else requests
    held = roomy(serve, requests) if cut else serve
    made = built(model, cluster, held, plan, whole, costs, profile, tables, taken=taken)
    replica = made.replica
    if replica is None:
        return without_room(model, cluster, serve, plan, len(requests), made.memory, profile)
    if serve.engine.budget == AUTO_BUDGET:
        engine = msgspec.structs.replace(serve.engine, budget=replica.limits.budget)
        serve = msgspec.structs.replace(serve, engine=engine)
    who = identity(model, cluster, serve, plan)
    together = bound_together(model, cluster, serve, plan, replica, costs)
    memory, blocks = made.memory, made.blocks
    if isinstance(together, ZooPlaces):
        together.lies(made.memory, requests)
        memory, blocks = together.memory(made.memory), together.blocks
    if together is not None:
        shares, served = together.served(requests)
    else:
        shares, served = served_by(serve, replica, requests, plan.layout.dp)
    metrics = serving_metrics(serve, shares, served)
    if detail and together is not None:
        metrics = together.with_intervals(metrics, requests, profile)
    elif detail:
        metrics = with_intervals(metrics, serve, replica, shares, profile)
    objectives = tuple(objectives_kept(serve, shares, served))
    power = together.answer(requests) if isinstance(together, PoweredReplicas) else None
    of_others = (*beyond_supply(power), *((JOBS_APART,) if serve.engine.beside else ()))
    return ServingPrediction(
        model=model,
        cluster=cluster,
        serve=serve,
        plan=plan,
        fits=made.fits or cut,
        metrics=metrics,
        objectives=objectives,
        num_requests=len(requests),
        kv_blocks=blocks,
        peak_kv_blocks=max(one.peak_blocks for one in served),
        peak_batch=max(one.peak_batch for one in served),
        preemptions=sum(one.evictions for one in served),
        iterations=sum(one.iterations for one in served),
        hit_rate=sum(int(one.cached.sum()) for one in served) / max(sum(int(one.prompt.sum()) for one in shares), 1),
        swaps=sum(one.swaps for one in served),
        attribution=attribution(replica.costs, served),
        query_s=query_summary(shares, served),
        withdrawn=len(requests) - sum(map(len, shares)),
        groups=group_metrics(serve, shares, served) if detail else (),
        fairness=fairness(shares, served) if detail else None,
        usage=usage(model, cluster, plan, made, shares, served) if detail else None,
        memory=memory,
        assumptions=assumptions(profile, costs, model, serve),
        warnings=(*otherwise(plan), *warnings(metrics, serve, shares, model, cluster), *of_others),
        timeline=replicas_over_time(shares, served, plan, cluster, who) if detail else Timeline.bare(identity=who),
        identity=who,
        beside=together.beside() if isinstance(together, SharedReplicas) else (),
        without=together.without if isinstance(together, SharedReplicas) else None,
        power=power,
    )


def bound_together(
    model: Model, cluster: Cluster, serve: Serve, plan: Plan, replica: Replica, costs: Costs
) -> Lenders | PairedReplicas | GovernedReplicas | ZooPlaces | None:
    """Return replicas that know of one another or are not alone on their devices; None where each serves by itself."""
    words = serve.engine
    kinds = ((words.borrow, Lenders), (words.pairs, PairedReplicas), (words.beside, SharedReplicas))
    kinds += ((words.power, PoweredReplicas), (words.zoo, ZooPlaces))
    kind = next((kind for said, kind in kinds if said), None)
    return None if kind is None else kind(model, cluster, serve, plan, replica, costs)
