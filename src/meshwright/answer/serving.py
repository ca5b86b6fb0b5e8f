"""Predict a serving workload: check, price iterations, simulate requests, and say why. The whole flow is
:func:`predict_serving`."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.latency import objectives_kept, serving_metrics, with_intervals
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.serving_answer import ServingMetrics, ServingPrediction
from meshwright.answer.serving_check import oversized, refused
from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import Plan
from meshwright.serving.batching import BatchPolicy, EngineLimits
from meshwright.serving.routing import Router
from meshwright.simulate.iterations import IterationCosts, priced
from meshwright.simulate.serve import simulate
from meshwright.simulate.serve_pool import pooled
from meshwright.simulate.served import HostTimes, Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Device
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.timeline import Counter, Identity, Timeline
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
) -> ServingPrediction:
    """Latency, throughput, memory and their reasons for a serving workload under `plan`.

    `requests` are those of the workload where they were drawn before, `profile` an engine in place of the one that the
    workload names. Without `detail` there are no intervals.

    Raises:
        MeshwrightError: every violation at once: W012 requests longer than the context or the cache, W013 an unknown
            policy, W014 a plan or model that serving does not take, and the P codes of the plan.
    """
    plan = plan.on(cluster.num_devices)
    requests = requests if requests is not None else serve.drawn()
    found = refused(plan, model, cluster, serve) + oversized(model, requests)
    if found:
        raise MeshwrightError(found)
    policy = serving.get("batching", serve.engine.policy)
    profile = profile or engine_profile(serve.engine.profile)
    forward, device = Forward(model, plan, Mesh(plan, cluster), serve.engine.kv), cluster.islands[0].device
    context = int((requests.prompt + requests.output).max())
    tokens, batch = _largest(serve, policy, requests, context), min(serve.engine.max_batch, len(requests))
    memory, blocks = kv_memory(forward, device, profile, serve, min(tokens, 1 << 20), batch)
    limits = EngineLimits(
        max_batch=serve.engine.max_batch,
        budget=serve.engine.budget or policy.budget,
        block=serve.engine.block,
        blocks=blocks,
    )
    who = _identity(model, cluster, serve, plan)
    shortest = int((requests.prompt + requests.output).min())
    if not serve.engine.kv_blocks and blocks * serve.engine.block < shortest:
        return _without_room(model, cluster, serve, plan, requests, memory, profile, who)
    costs = costs or serving_costs()
    table = priced(
        forward, device, costs, tokens=min(tokens, blocks * limits.block + batch), batch=batch, context=context
    )
    if profile.kernels != 1.0:
        table = table.scaled(np.full(len(PRICED), profile.kernels), profile.kernels)
    replica = Replica(
        policy=policy,
        limits=limits,
        costs=table,
        host=host_times(profile, model, serve),
        stages=plan.layout.pp,
    )
    shares, served = _served(serve, replica, requests, plan.layout.dp)
    metrics = serving_metrics(serve, shares, served)
    if detail:
        metrics = with_intervals(metrics, serve, replica, shares, profile)
    objectives = tuple(objectives_kept(serve, shares, served))
    return ServingPrediction(
        model=model,
        cluster=cluster,
        serve=serve,
        plan=plan,
        fits=all(rank.headroom_bytes >= 0 for rank in memory),
        metrics=metrics,
        objectives=objectives,
        num_requests=len(requests),
        kv_blocks=blocks,
        peak_kv_blocks=max(one.peak_blocks for one in served),
        peak_batch=max(one.peak_batch for one in served),
        preemptions=sum(one.evictions for one in served),
        iterations=sum(one.iterations for one in served),
        attribution=_attribution(table, served),
        memory=memory,
        assumptions=_assumptions(profile, costs, table, requests),
        warnings=_warnings(metrics, serve, shares, model),
        timeline=_timeline(shares, served, limits, who) if detail else Timeline.bare(identity=who),
        identity=who,
    )


def host_times(profile: EngineProfile, model: Model, serve: Serve) -> HostTimes:
    """Return what the host of an engine adds to the iterations of a model."""
    return HostTimes(
        step_s=profile.step_us * 1e-6,
        request_s=profile.request_us * 1e-6,
        eager_s=profile.layer_us * 1e-6 * model.num_layers,
        graph_tokens=profile.graph_tokens if serve.engine.graphs else 0,
    )


def kv_memory(
    forward: Forward, device: Device, profile: EngineProfile, serve: Serve, tokens: int, batch: int
) -> tuple[tuple[RankMemory, ...], int]:
    """Return what the ranks of every pipeline stage hold, and the cache blocks of a replica: those for which there is
    room on all, or as many as were said."""
    layout, capacity = forward.plan.layout, float(device.memory_bytes)
    groups = (layout.tp > 1) + (layout.pp > 1)
    fixed, room = [], []
    for stage in range(layout.pp):
        held = {
            "weights": forward.weight_bytes(stage),
            "workspace": forward.workspace_bytes(tokens, batch),
            "engine context": profile.context_bytes,
            "communication buffers": groups * profile.communicator_bytes,
        }
        each = forward.kv_bytes(stage) * serve.engine.block
        left = capacity * serve.engine.memory - sum(held.values())
        fixed.append((held, each))
        room.append(int(left / each) if each and left > 0 else 0)
    blocks = serve.engine.kv_blocks or max(0, min(room))
    memory = tuple(
        RankMemory(
            rank=f"stage {stage}" if layout.pp > 1 else "every rank",
            multiplicity=layout.tp * layout.dp,
            capacity_bytes=capacity,
            peak_bytes=sum(held.values()) + blocks * each,
            at_s=0.0,
            alive=held | {"keys and values": blocks * each},
        )
        for stage, (held, each) in enumerate(fixed)
    )
    return memory, blocks


def _largest(serve: Serve, policy: BatchPolicy, requests: Requests, context: int) -> int:
    """Tokens of the largest iteration: the budget, or where there is none every prompt of a batch."""
    budget = serve.engine.budget or policy.budget
    if not budget:
        return int(np.sort(requests.prompt)[::-1][: serve.engine.max_batch].sum())
    longest = context if policy.name == "vllm-v0" else 0
    return max(budget, longest) + serve.engine.max_batch


def _served(
    serve: Serve, replica: Replica, requests: Requests, replicas: int
) -> tuple[list[Requests], list[ServedRequests]]:
    """The requests of every replica that has any, and what became of them."""
    router = serving.get("routing", serve.engine.routing)
    if replicas > 1 and router.looks:
        return pooled(replica, replicas, requests, router)
    shares = _routed(router, requests, replicas)
    return shares, [simulate(replica, share) for share in shares]


def _routed(router: Router, requests: Requests, replicas: int) -> list[Requests]:
    """The requests of every replica that has any; a closed loop's open requests are shared out too."""
    if replicas == 1:
        return [requests]
    where = router.assign(requests, replicas)
    shares = [requests.chosen(np.flatnonzero(where == one)) for one in range(replicas)]
    loops = [requests.concurrency // replicas + (one < requests.concurrency % replicas) for one in range(replicas)]
    if requests.concurrency:
        shares = [msgspec.structs.replace(share, concurrency=max(1, n)) for share, n in zip(shares, loops)]
    return [share for share in shares if len(share)]


def _attribution(table: IterationCosts, served: list[ServedRequests]) -> dict[str, float]:
    """Seconds of all replicas by cause; they sum to the replicas' time."""
    linear = sum(one.tokens_seen for one in served) @ table.linear_parts
    spent = sum(one.spent_s for one in served)
    sampling = table.sampled_parts[1:].sum(axis=0)
    parts = linear + sampling * (spent[1] / sampling.sum() if sampling.sum() else 0.0)
    found = {name: float(parts[CAUSE[name]]) for name in SERVING_CAUSES if name in CAUSE}
    found["attention"] += float(spent[2] + spent[3])
    found["host"] += float(spent[4])
    return found | {"idle": float(spent[5])}


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


def _assumptions(profile: EngineProfile, costs: Costs, table: IterationCosts, requests: Requests) -> tuple:
    kernels = Assumption("kernels", costs.profile, "meshwright catalog, docs/cost-model.md")
    answers = Assumption(
        "lengths of answers", "as the workload says them; admission that reserves knows them", "the workload"
    )
    return (_engine_assumption(profile), kernels, answers)


def _warnings(metrics: ServingMetrics, serve: Serve, shares: list[Requests], model: Model) -> tuple[str, ...]:
    found = []
    offered = [len(s) / float(s.arrival_s[-1] - s.arrival_s[0]) for s in shares if len(s) > 50 and s.arrival_s[-1] > 0]
    if offered and metrics.throughput_req_per_s < 0.9 * sum(offered):
        found.append(
            f"requests arrive faster ({sum(offered):.3g}/s) than they are answered "
            f"({metrics.throughput_req_per_s:.3g}/s): latencies grow with the length of the run"
        )
    if any(a.window for a in model.attentions):
        found.append("the cache of layers with a sliding window is counted whole")
    return tuple(found)


def _timeline(shares: list[Requests], served: list[ServedRequests], limits: EngineLimits, who: Identity) -> Timeline:
    """The state of the first replica over time, and a record of every request."""
    first = served[0]
    names = (("running", "requests"), ("waiting", "requests"), ("cache blocks", "blocks"))
    counters = tuple(
        Counter(name=name, unit=unit, time_s=first.sample_s, value=first.sample[:, i].astype(np.float64))
        for i, (name, unit) in enumerate(names)
    )
    replica = np.concatenate([np.full(len(s), i, np.int64) for i, s in enumerate(shares)])
    columns = {"replica": replica}
    for name in ("prompt", "output"):
        columns[f"{name}_tokens"] = np.concatenate([getattr(s, name) for s in shares])
    for name in ("arrival_s", "scheduled_s", "first_s", "end_s", "evicted"):
        columns[name] = np.concatenate([getattr(s, name) for s in served])
    order = np.argsort(columns["arrival_s"], kind="stable")
    return Timeline.bare(
        counters=counters,
        records={"requests": {name: column[order] for name, column in columns.items()}},
        identity=who,
    )
