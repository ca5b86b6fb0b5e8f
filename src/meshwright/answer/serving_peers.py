"""Predict requests that go through chains of peers."""

from __future__ import annotations

from meshwright.answer.latency import objectives_kept, serving_metrics
from meshwright.answer.peer_places import PeersOfPlan
from meshwright.answer.prediction import Assumption
from meshwright.answer.serving_answer import ServingPrediction
from meshwright.answer.serving_why import assumptions, attribution, identity, replicas_over_time, warnings
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.plan import Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.timeline import Timeline


def predict_peers(
    model: Model,
    cluster: Cluster,
    serve: Serve,
    plan: Plan,
    requests: Requests,
    roomy: Serve,
    costs: Costs,
    profile: EngineProfile,
    *,
    detail: bool = True,
) -> ServingPrediction:
    """Return the answer of a legal question; `roomy` is its workload with a cache that never is full.

    Raises:
        MeshwrightError: W012 where some layer is no peer's, from the beginning or once peers are lost.
    """
    peers = PeersOfPlan(model, cluster, serve, plan, requests, costs, profile, built_for=roomy)
    shares, served = peers.served(requests)
    metrics = serving_metrics(serve, shares, served)
    if detail:
        metrics = peers.with_intervals(metrics, requests, profile)
    (one,) = served
    who, memory = identity(model, cluster, serve, plan), peers.memory()
    spread = attribution(peers.replicas[0].costs, served)
    counted = float(one.tokens_seen @ peers.replicas[0].costs.linear_s[: len(one.tokens_seen)])
    factor = float(one.spent_s[0]) / max(counted, 1e-30)  # other kinds of peers divide their time as the first does
    causes = {n: s if n in ("attention", "host", "idle") else float(s) * factor for n, s in spread.items()}
    said = ", ".join(f"{first}-{end - 1}" for first, end in peers.spans)
    layers = Assumption("layers of peers", said, "each joins where layers are served worst (2209.01188)")
    client = Assumption("client", "beside the first peer; the last one computes the scores", "", True)
    return ServingPrediction(
        model=model,
        cluster=cluster,
        serve=serve,
        plan=plan,
        fits=all(rank.headroom_bytes >= 0 for rank in memory),
        metrics=metrics,
        objectives=tuple(objectives_kept(serve, shares, served)),
        num_requests=len(requests),
        kv_blocks=peers.blocks,
        peak_kv_blocks=one.peak_blocks,
        peak_batch=one.peak_batch,
        preemptions=one.evictions,
        iterations=one.iterations,
        hit_rate=0.0,
        swaps=0,
        attribution=causes,
        memory=memory,
        assumptions=(*assumptions(profile, costs, model, serve), layers, client),
        warnings=warnings(metrics, serve, shares, model, cluster),
        timeline=replicas_over_time(shares, served, plan, cluster, who) if detail else Timeline.bare(identity=who),
        identity=who,
    )
