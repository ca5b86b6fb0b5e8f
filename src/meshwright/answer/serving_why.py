"""The reasons of a serving answer: where the replicas' time goes, what it rests on, warnings, the timeline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright import serving
from meshwright.answer.drafting import HEAD
from meshwright.answer.prediction import Assumption, RankMemory
from meshwright.answer.replica import wanted_s
from meshwright.answer.serving_answer import ServingMetrics, ServingPrediction
from meshwright.causes import CAUSE
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.cost.power import MEMORY_SHARE
from meshwright.plan import Plan
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.served import GAP_EDGES, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.timeline import Counter, Identity, RankClass, Timeline
from meshwright.version import VERSION

#: Places of what few replicas spend time on, and their names.
MOVED = ((6, "cache moves"), (7, "adapters"), (8, "blocks elsewhere"), (9, "on a part of the devices"))
#: Causes of a serving replica's time, in the order they are shown.
SERVING_CAUSES = ("gemm", "attention", "elementwise", "tp", "ep", "pp", "host", "idle")


def attribution(table: IterationCosts, served: list[ServedRequests]) -> dict[str, float]:
    """Return the seconds of all replicas by cause; they sum to the replicas' time."""
    linear = sum(one.tokens_seen for one in served) @ table.linear_parts
    spent = sum(one.spent_s for one in served)
    sampling = table.sampled_parts[1:].sum(axis=0)
    parts = linear + sampling * (spent[1] / sampling.sum() if sampling.sum() else 0.0)
    found = {name: float(parts[CAUSE[name]]) for name in SERVING_CAUSES if name in CAUSE}
    found["attention"] += float(spent[2] + spent[3])
    found["host"] += float(spent[4])
    moves = {name: float(spent[i]) for i, name in MOVED if spent[i]}
    return found | moves | {"idle": float(spent[5])}


def identity(model: Model, cluster: Cluster, serve: Serve, plan: Plan) -> Identity:
    """Return the identity of an answer."""
    return Identity(
        code=VERSION,
        costs="catalog profiles of serving kernels, else roofline",
        model=model.name,
        cluster=cluster.name,
        workload=serve.text(),
        plan=plan.text(),
    )


def engine_assumption(profile: EngineProfile) -> Assumption:
    """Return the assumption that an engine's profile is."""
    more = f"{profile.experts_us:g} us more with experts"
    more += f", {profile.latent_us:g} us with latent attention" if profile.latent_us else ""
    front = (
        f"{profile.serial_us:g} us a request and {profile.serial_token_us:g} us a token of its prompt at the front, "
    )
    front = f"{front}one after the other; " if profile.serial_us or profile.serial_token_us else ""
    front += f"{profile.stream_us:g} us a token that leaves, one after the other; " if profile.stream_us else ""
    said = (
        f"kernels {profile.kernels:g} times as long as alone ({profile.kernels * profile.prompts:g} beyond "
        f"{profile.graph_tokens} tokens), {profile.step_us:g} us an iteration, {profile.request_us:g} us a request in "
        f"it, {profile.layer_us:g} us a layer and {more} where no CUDA graph is "
        f"replayed; {front}clients see tokens {profile.front_us * 1e-3:g} ms, {profile.token_us:g} us a token of the "
        f"prompt and {profile.front_steps:g} iterations later; {profile.sigma:.0%} spread, "
        f"{profile.front_sigma:.0%} of times to the first token"
    )
    return Assumption(f"engine profile {profile.name!r}", said, profile.source, profile.flagged)


def assumptions(profile: EngineProfile, costs: Costs, model: Model, serve: Serve) -> tuple[Assumption, ...]:
    """Return what an answer rests on."""
    kernels = Assumption("kernels", costs.profile, "meshwright catalog, docs/serving.md")
    answers = Assumption(
        "lengths of answers", "as the workload says them; admission that reserves knows them", "the workload"
    )
    power = Assumption(
        "power",
        f"rated while devices multiply, {MEMORY_SHARE:.0%} of the way there while they wait for memory, idle when not",
        "catalog devices; 2605.11999 (H200), abstract",
        True,
    )
    found = (engine_assumption(profile), kernels, answers, power)
    if any(a.window for a in model.attentions) or any(block.mixer is not None for block in model.blocks):
        said = "blocks of the mean request: as many of its tokens as are seen again, and states of scans in fp32"
        found += (Assumption("cache", said, "its layers; engines free what has left a sliding window"),)
    return found + tuple(Assumption("requests", said, source) for said, source in serve.origins().items())


def warnings(
    metrics: ServingMetrics, serve: Serve, shares: list[Requests], model: Model, cluster: Cluster
) -> tuple[str, ...]:
    """Return what whoever reads the answer should know."""
    found = [f"{model.name}: {note}" for note in model.notes] + list(cluster.notes)
    for longest in sorted({one.longest for one in (serve, *serve.clients) if one.longest}):
        found.append(f"requests with more than {longest:,} tokens are left out (longest=)")
    if serve.engine.draft == HEAD:
        found.append(
            f"draft={HEAD} takes {model.name} to have a trained head for tokens further ahead, one more layer: whether "
            "its weights have one is not known here"
        )
    found += _idle_policies(serve, shares)
    if any(len(share.hashes) for share in shares) and not serve.engine.prefix_cache:
        found.append("prompts begin alike, and every one is computed whole: prefix_cache=yes keeps what they share")
    if serve.engine.prefix_cache and not any(len(share.hashes) for share in shares):
        found.append(
            "prefix_cache=yes finds nothing: no requests share tokens (prefix=, turns=, samples=, some traces)"
        )
    offered = [len(s) / float(s.arrival_s[-1] - s.arrival_s[0]) for s in shares if len(s) > 50 and s.arrival_s[-1] > 0]
    offered = [] if any(len(s.after) for s in shares) else offered  # who waits for an answer does not come faster
    if offered and metrics.throughput_req_per_s < 0.9 * sum(offered):
        found.append(
            f"requests arrive faster ({sum(offered):.3g}/s) than they are answered "
            f"({metrics.throughput_req_per_s:.3g}/s): latencies grow with the length of the run"
        )
    return tuple(found)


#: Columns of requests, and a bound, that policies go by, in words.
GONE_BY = {
    "tenant": "tenants (tenants=)",
    "hashes": "shared prefixes (prefix=, with prefix_cache=yes)",
    "program": "queries of several requests (samples=)",
    "priority": "priorities (priority=)",
    "ttft": "when a first token is wanted (ttft=)",
}


def _idle_policies(serve: Serve, shares: list[Requests]) -> list[str]:
    """Warnings of policies that go by what no request says."""
    found = []
    for axis, name in (("order", serve.engine.order), ("routing", serve.engine.routing)):
        column = getattr(serving.get(axis, name), "goes_by", "")
        said = wanted_s(serve) if column == "ttft" else any(len(getattr(s, column)) for s in shares) if column else True
        if not said:
            found.append(f"{axis}={name} goes by {GONE_BY[column]}, which no request says")
    return found


def replicas_over_time(
    shares: list[Requests], served: list[ServedRequests], plan: Plan, cluster: Cluster, who: Identity
) -> Timeline:
    """Return the state of every replica over time, a record of every request, and how often each gap between tokens
    was."""
    replica = np.concatenate([np.full(len(s), i, np.int64) for i, s in enumerate(shares)])
    columns = {"replica": replica}
    for name in ("prompt", "output"):
        columns[f"{name}_tokens"] = np.concatenate([getattr(s, name) for s in shares])
    for name in ("arrival_s", "scheduled_s", "first_s", "end_s", "evicted", "cached"):
        columns[name] = np.concatenate([getattr(s, name) for s in served])
    device, each = cluster.islands[0].device.name, plan.layout.tp * plan.layout.pp
    ranks = [RankClass(label=f"replica {place}", device=device, multiplicity=each) for place in range(len(served))]
    return over_time(ranks, served, columns, who)


def over_time(
    ranks: Sequence[RankClass], served: Sequence[ServedRequests], columns: dict[str, np.ndarray], who: Identity
) -> Timeline:
    """Return the timeline of replicas, each a rank class, with the records of requests in these columns [n]."""
    names = (("running", "requests"), ("waiting", "requests"), ("cache blocks", "blocks"))
    counters = tuple(
        Counter(name=name, unit=unit, time_s=one.sample_s, value=one.sample[:, i].astype(np.float64), rank=place)
        for place, one in enumerate(served)
        for i, (name, unit) in enumerate(names)
    )
    gaps = sum(one.gaps for one in served)
    found = np.flatnonzero(gaps)
    order = np.argsort(columns["arrival_s"], kind="stable")
    return Timeline.bare(
        ranks=tuple(ranks),
        counters=counters,
        records={
            "requests": {name: column[order] for name, column in columns.items()},
            "gaps": {"gap_s": GAP_EDGES[found] * 1.01, "count": gaps[found]},
        },
        identity=who,
    )


def without_room(
    model: Model,
    cluster: Cluster,
    serve: Serve,
    plan: Plan,
    num_requests: int,
    memory: tuple[RankMemory, ...],
    profile: EngineProfile,
) -> ServingPrediction:
    """Return the answer where not even one request fits beside the weights."""
    who = identity(model, cluster, serve, plan)
    return ServingPrediction(
        model=model,
        cluster=cluster,
        serve=serve,
        plan=plan,
        fits=False,
        metrics=None,
        objectives=(),
        num_requests=num_requests,
        kv_blocks=0,
        peak_kv_blocks=0,
        peak_batch=0,
        preemptions=0,
        iterations=0,
        hit_rate=0.0,
        swaps=0,
        attribution={},
        memory=memory,
        assumptions=(engine_assumption(profile),),
        warnings=(),
        timeline=Timeline.bare(identity=who),
        identity=who,
    )
