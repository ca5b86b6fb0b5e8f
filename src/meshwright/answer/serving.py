"""Predict a serving workload: check, price iterations, simulate requests, and say why. The whole flow is
:func:`predict_serving`."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import numpy as np

from meshwright.answer.fairness import fairness, group_metrics
from meshwright.answer.latency import objectives_kept, serving_metrics, with_intervals
from meshwright.answer.prediction import Assumption
from meshwright.answer.replica import built, padded, served_by
from meshwright.answer.serving_answer import ServingMetrics, ServingPrediction
from meshwright.answer.serving_check import oversized, refused, unshared
from meshwright.answer.usage import usage
from meshwright.causes import CAUSE
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.served import GAP_EDGES, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.spec.serve_values import AUTO_BUDGET
from meshwright.timeline import Counter, Identity, RankClass, Timeline
from meshwright.version import VERSION

#: Causes of a serving replica's time, in the order they are shown.
SERVING_CAUSES = ("gemm", "attention", "elementwise", "tp", "ep", "pp", "host", "idle")


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
    if found:
        raise MeshwrightError(found)
    if plan.serving.padded:
        requests = padded(requests, serve.batch or serve.engine.max_batch)
    profile, costs = profile or engine_profile(serve.engine.profile), costs or serving_costs()
    made = built(model, cluster, serve, plan, requests, costs, profile, tables)
    who, replica = _identity(model, cluster, serve, plan), made.replica
    if replica is None:
        return _without_room(model, cluster, serve, plan, requests, made.memory, profile, who)
    if serve.engine.budget == AUTO_BUDGET:
        engine = msgspec.structs.replace(serve.engine, budget=replica.limits.budget)
        serve = msgspec.structs.replace(serve, engine=engine)
    shares, served = served_by(serve, replica, requests, plan.layout.dp)
    metrics = serving_metrics(serve, shares, served)
    if detail:
        metrics = with_intervals(metrics, serve, replica, shares, profile)
    objectives = tuple(objectives_kept(serve, shares, served))
    return ServingPrediction(
        model=model,
        cluster=cluster,
        serve=serve,
        plan=plan,
        fits=made.fits,
        metrics=metrics,
        objectives=objectives,
        num_requests=len(requests),
        kv_blocks=made.blocks,
        peak_kv_blocks=max(one.peak_blocks for one in served),
        peak_batch=max(one.peak_batch for one in served),
        preemptions=sum(one.evictions for one in served),
        iterations=sum(one.iterations for one in served),
        hit_rate=sum(int(one.cached.sum()) for one in served) / max(int(requests.prompt.sum()), 1),
        swaps=sum(one.swaps for one in served),
        attribution=_attribution(replica.costs, served),
        groups=group_metrics(serve, shares, served) if detail else (),
        fairness=fairness(shares, served) if detail else None,
        usage=usage(model, cluster, plan, made, shares, served) if detail else None,
        memory=made.memory,
        assumptions=_assumptions(profile, costs, model, serve),
        warnings=_warnings(metrics, serve, shares, model),
        timeline=_timeline(shares, served, plan, cluster, who) if detail else Timeline.bare(identity=who),
        identity=who,
    )


def _attribution(table: IterationCosts, served: list[ServedRequests]) -> dict[str, float]:
    """Seconds of all replicas by cause; they sum to the replicas' time."""
    linear = sum(one.tokens_seen for one in served) @ table.linear_parts
    spent = sum(one.spent_s for one in served)
    sampling = table.sampled_parts[1:].sum(axis=0)
    parts = linear + sampling * (spent[1] / sampling.sum() if sampling.sum() else 0.0)
    found = {name: float(parts[CAUSE[name]]) for name in SERVING_CAUSES if name in CAUSE}
    found["attention"] += float(spent[2] + spent[3])
    found["host"] += float(spent[4])
    moves = {name: float(spent[i]) for i, name in ((6, "cache moves"), (7, "adapters")) if spent[i]}
    return found | moves | {"idle": float(spent[5])}


def _identity(model: Model, cluster: Cluster, serve: Serve, plan: Plan) -> Identity:
    return Identity(
        code=VERSION,
        costs="catalog profiles of serving kernels, else roofline",
        model=model.name,
        cluster=cluster.name,
        workload=serve.text(),
        plan=plan.text(),
    )


def _without_room(model, cluster, serve, plan, requests, memory, profile, who) -> ServingPrediction:
    """The answer where not even one request fits beside the weights."""
    return ServingPrediction(
        model=model,
        cluster=cluster,
        serve=serve,
        plan=plan,
        fits=False,
        metrics=None,
        objectives=(),
        num_requests=len(requests),
        kv_blocks=0,
        peak_kv_blocks=0,
        peak_batch=0,
        preemptions=0,
        iterations=0,
        hit_rate=0.0,
        swaps=0,
        attribution={},
        memory=memory,
        assumptions=(_engine_assumption(profile),),
        warnings=(),
        timeline=Timeline.bare(identity=who),
        identity=who,
    )


def _engine_assumption(profile: EngineProfile) -> Assumption:
    said = (
        f"kernels {profile.kernels:g} times as long as alone, {profile.step_us:g} us an iteration, "
        f"{profile.request_us:g} us a request in it, {profile.layer_us:g} us a layer without CUDA graphs (up to "
        f"{profile.graph_tokens} tokens with), {profile.sigma:.0%} spread"
    )
    return Assumption(f"engine profile {profile.name!r}", said, profile.source, profile.flagged)


def _assumptions(profile: EngineProfile, costs: Costs, model: Model, serve: Serve) -> tuple:
    kernels = Assumption("kernels", costs.profile, "meshwright catalog, docs/cost-model.md")
    answers = Assumption(
        "lengths of answers", "as the workload says them; admission that reserves knows them", "the workload"
    )
    power = Assumption("power", "rated while devices compute, idle power when not", "catalog devices", True)
    found = (_engine_assumption(profile), kernels, answers, power)
    if any(a.window for a in model.attentions) or any(block.mixer is not None for block in model.blocks):
        said = "blocks of the mean request: as many of its tokens as are seen again, and states of scans in fp32"
        found += (Assumption("cache", said, "its layers; engines free what has left a sliding window"),)
    return found + tuple(Assumption("requests", said, source) for said, source in serve.origins().items())


def _warnings(metrics: ServingMetrics, serve: Serve, shares: list[Requests], model: Model) -> tuple[str, ...]:
    found = []
    for longest in sorted({one.longest for one in (serve, *serve.clients) if one.longest}):
        found.append(f"requests with more than {longest:,} tokens are left out (longest=)")
    if any(len(share.hashes) for share in shares) and not serve.engine.prefix_cache:
        found.append("prompts begin alike, and every one is computed whole: prefix_cache=yes keeps what they share")
    offered = [len(s) / float(s.arrival_s[-1] - s.arrival_s[0]) for s in shares if len(s) > 50 and s.arrival_s[-1] > 0]
    offered = [] if any(len(s.after) for s in shares) else offered  # who waits for an answer does not come faster
    if offered and metrics.throughput_req_per_s < 0.9 * sum(offered):
        found.append(
            f"requests arrive faster ({sum(offered):.3g}/s) than they are answered "
            f"({metrics.throughput_req_per_s:.3g}/s): latencies grow with the length of the run"
        )
    return tuple(found)


def _timeline(
    shares: list[Requests], served: list[ServedRequests], plan: Plan, cluster: Cluster, who: Identity
) -> Timeline:
    """The state of every replica over time, a record of every request, and how often each gap between tokens was."""
    names = (("running", "requests"), ("waiting", "requests"), ("cache blocks", "blocks"))
    counters = tuple(
        Counter(name=name, unit=unit, time_s=one.sample_s, value=one.sample[:, i].astype(np.float64), rank=place)
        for place, one in enumerate(served)
        for i, (name, unit) in enumerate(names)
    )
    gaps = sum(one.gaps for one in served)
    device, each = cluster.islands[0].device.name, plan.layout.tp * plan.layout.pp
    found = np.flatnonzero(gaps)
    replica = np.concatenate([np.full(len(s), i, np.int64) for i, s in enumerate(shares)])
    columns = {"replica": replica}
    for name in ("prompt", "output"):
        columns[f"{name}_tokens"] = np.concatenate([getattr(s, name) for s in shares])
    for name in ("arrival_s", "scheduled_s", "first_s", "end_s", "evicted", "cached"):
        columns[name] = np.concatenate([getattr(s, name) for s in served])
    order = np.argsort(columns["arrival_s"], kind="stable")
    return Timeline.bare(
        ranks=tuple(
            RankClass(label=f"replica {place}", device=device, multiplicity=each) for place in range(len(served))
        ),
        counters=counters,
        records={
            "requests": {name: column[order] for name, column in columns.items()},
            "gaps": {"gap_s": GAP_EDGES[found] * 1.01, "count": gaps[found]},
        },
        identity=who,
    )
