"""Predict a serving workload whose prompts are computed by some pools of replicas, and whose answers by others."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from statistics import NormalDist
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.fairness import fairness, group_metrics
from meshwright.answer.kv_paths import kv_path
from meshwright.answer.latency import (
    DRAWN_PLAINLY,
    NUM_DRAWS,
    drawn,
    objectives_kept,
    serving_metrics,
    spread_over,
    summary,
)
from meshwright.answer.prediction import RankMemory
from meshwright.answer.replica import BuiltReplica, alone, built
from meshwright.answer.serving_answer import KvTransfers, ServedPool, ServingMetrics, ServingPrediction
from meshwright.answer.serving_why import assumptions, attribution, identity, over_time, warnings, without_room
from meshwright.answer.usage import PoolUsage, Usage, together, usage
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.lower.forward import Forward
from meshwright.lower.handover import KvCrossing, pairs
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan, Pool
from meshwright.plan.serving_roles import PREFILL, role
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.kv_links import KvPath
from meshwright.simulate.serve import refuse_oversized
from meshwright.simulate.serve_apart import ApartReplicas, ServedApart
from meshwright.simulate.serve_split import served_split
from meshwright.simulate.served import ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.hardware import Device
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.timeline import Identity, RankClass, Timeline
from meshwright.work import Group

#: The seconds of links in an attribution: they pass beside those of the replicas.
LINKS = "kv links"


class _BuiltPool(NamedTuple):
    """A pool on its devices: its part of the cluster, what its replicas are, and the first of them among all."""

    pool: Pool
    cluster: Cluster
    made: BuiltReplica
    forward: Forward
    first: int

    @property
    def count(self) -> int:
        return self.pool.plan.layout.dp

    @property
    def devices(self) -> int:
        """Devices of each replica."""
        return self.pool.plan.layout.num_ranks // self.count

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


def predict_pools(
    model: Model,
    cluster: Cluster,
    serve: Serve,
    plan: Plan,
    requests: Requests,
    costs: Costs,
    profile: EngineProfile,
    *,
    detail: bool = True,
    tables: dict[Hashable, IterationCosts] | None = None,
) -> ServingPrediction:
    """Return the answer for a legal plan of several pools on devices.

    Raises:
        MeshwrightError: W012 for requests that the cache of a pool can never hold.
    """
    pools = _built(model, cluster, serve, plan, requests, costs, profile, tables)
    memory = _memory(pools)
    if any(one.made.replica is None for one in pools):
        return without_room(model, cluster, serve, plan, len(requests), memory, profile)
    for one in pools:
        refuse_oversized(one.made.replica, _asked(plan, one.pool, requests))
    apart, sigma = _apart(cluster, serve, plan, pools, requests, costs)
    router = serving.get("routing", serve.engine.routing)
    found, who = served_split(apart, requests, router), identity(model, cluster, serve, plan)
    computed, whole = found, found.whole.seen(requests, apart.replicas[0].host)
    found = msgspec.structs.replace(found, whole=whole)
    metrics = serving_metrics(serve, [requests], [whole])
    if detail:
        metrics = _with_intervals(metrics, serve, apart, requests, profile, sigma)
    spent = [attribution(one.made.replica.costs, [found.each[i] for i in one.numbers]) for one in pools]
    causes = {name: sum(some.get(name, 0.0) for some in spent) for name in dict.fromkeys(n for s in spent for n in s)}
    served = tuple(_served_pool(plan, one, found) for one in pools)
    fullest = max(served, key=lambda pool: pool.peak_kv_blocks / max(pool.kv_blocks, 1))
    return ServingPrediction(
        model=model,
        cluster=cluster,
        serve=serve,
        plan=plan,
        fits=all(one.made.fits for one in pools),
        metrics=metrics,
        objectives=tuple(objectives_kept(serve, [requests], [whole])),
        num_requests=len(requests),
        kv_blocks=fullest.kv_blocks,
        peak_kv_blocks=fullest.peak_kv_blocks,
        peak_batch=whole.peak_batch,
        preemptions=whole.evictions,
        iterations=whole.iterations,
        hit_rate=int(whole.cached.sum()) / max(int(requests.prompt.sum()), 1),
        swaps=whole.swaps,
        attribution=causes | {LINKS: found.link_s},
        groups=group_metrics(serve, [requests], [whole]) if detail else (),
        fairness=fairness([requests], [whole]) if detail else None,
        usage=_usage(model, pools, found, requests) if detail else None,
        memory=memory,
        assumptions=assumptions(profile, costs, model, serve),
        warnings=warnings(metrics, serve, [requests], model, cluster),
        timeline=_timeline(requests, found, pools, who) if detail else Timeline.bare(identity=who),
        identity=who,
        pools=served,
        transfers=_transfers(computed, whole.end_s, requests, pools),
    )


def _built(
    model: Model,
    cluster: Cluster,
    serve: Serve,
    plan: Plan,
    requests: Requests,
    costs: Costs,
    profile: EngineProfile,
    tables: dict[Hashable, IterationCosts] | None,
    blocks: Mapping[str, int] = MappingProxyType({}),
) -> list[_BuiltPool]:
    """The pools on their devices; prices are shared with other plans where all devices are alike."""
    shared = tables if len(cluster.islands) == 1 else None
    out: list[_BuiltPool] = []
    first = 0
    for pool in plan.pools:
        own = cut(cluster, *pool.devices)
        asked = _asked(plan, pool, requests)
        words = msgspec.structs.replace(serve.engine, kv_blocks=blocks.get(pool.name) or serve.engine.kv_blocks)
        its = msgspec.structs.replace(serve, engine=words)
        made = built(model, own, its, pool.plan, asked, costs, profile, shared)
        one = alone(pool.plan)
        forward = Forward(model, one, Mesh(one, own), serve.engine.kv, routing=serve.expert_routing)
        out.append(_BuiltPool(pool, own, made, forward, first))
        first += pool.plan.layout.dp
    return out


def _asked(plan: Plan, pool: Pool, requests: Requests) -> Requests:
    """The requests as a pool is asked them: one that computes prompts alone owes one token each."""
    if role(plan, pool.name) != PREFILL:
        return requests
    return msgspec.structs.replace(requests, output=np.ones_like(requests.output))


def _memory(pools: Sequence[_BuiltPool]) -> tuple[RankMemory, ...]:
    """The memory of the ranks of all pools."""
    return tuple(
        msgspec.structs.replace(rank, rank=f"{one.pool.name}: {rank.rank}") for one in pools for rank in one.made.memory
    )


def _apart(
    cluster: Cluster, serve: Serve, plan: Plan, pools: Sequence[_BuiltPool], requests: Requests, costs: Costs
) -> tuple[ApartReplicas, float]:
    """The replicas of all pools in their roles, with the ways between them, and the relative error of the times that
    the mean prompt's cache takes on them."""
    by_name = {one.pool.name: one for one in pools}
    mesh = Mesh(Plan(layout=Layout(dp=cluster.num_devices)), cluster)
    targets: list[list[int]] = [[] for one in pools for _ in one.numbers]
    paths: dict[tuple[int, int], KvPath] = {}
    sigma, mean = 0.0, max(1, int(requests.prompt.mean()))
    for link in plan.links:
        a, b = by_name[link.source], by_name[link.target]
        between, devices = KvCrossing(a.forward, b.forward), (_device(a), _device(b))
        known: dict[tuple[Group, ...], KvPath] = {}
        for (i, j), groups in pairs(a.pool, b.pool, between, mesh).items():
            if groups not in known:
                known[groups], spread = kv_path(between, groups, devices, costs, mean)
                sigma = max(sigma, spread)
            paths[a.first + i, b.first + j] = known[groups]
        for number in a.numbers:
            targets[number] += b.numbers
    apart = ApartReplicas(
        replicas=tuple(one.made.replica for one in pools for _ in one.numbers),
        targets=tuple(map(tuple, targets)),
        paths=paths,
        layerwise=serve.engine.kv_send == "layerwise",
    )
    return apart, sigma


def _device(one: _BuiltPool) -> Device:
    return one.cluster.islands[0].device


def _with_intervals(
    metrics: ServingMetrics,
    serve: Serve,
    apart: ApartReplicas,
    requests: Requests,
    profile: EngineProfile,
    sigma: float,
) -> ServingMetrics:
    """The metrics with 80% intervals: the first requests served again under draws of the errors of all replicas' costs,
    which are drawn alike, and of the links."""
    first = requests.first(DRAWN_PLAINLY)
    drawn_served = _under_errors(serve, apart, first, profile, sigma)
    found = [serving_metrics(serve, [first], [one]) for one in drawn_served]
    return spread_over(metrics, found[0], found[1:])


def _under_errors(
    serve: Serve, apart: ApartReplicas, requests: Requests, profile: EngineProfile, sigma: float
) -> Iterator[ServedRequests]:
    """Yield the records of requests without any error, then under each draw of the errors of costs and links."""
    router = serving.get("routing", serve.engine.routing)
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
    links = np.exp(np.random.default_rng(1).permutation(normal) * sigma).tolist()
    each = {number: drawn(one, profile) for number, one in {id(one): one for one in apart.replicas}.items()}

    def served(replicas: tuple, factor: float) -> ServedRequests:
        slower = {path: path.slower(factor) for path in apart.paths.values()}
        paths = {way: slower[path] for way, path in apart.paths.items()}
        found = served_split(msgspec.structs.replace(apart, replicas=replicas, paths=paths), requests, router)
        return found.whole.seen(requests, replicas[0].host)

    yield served(apart.replicas, 1.0)
    for i in range(NUM_DRAWS):
        yield served(tuple(each[id(one)][i] for one in apart.replicas), links[i])


class ServedPools:
    """The replicas of a legal plan of several pools, for many questions about `requests`: when each has its tokens, and
    under errors of the costs. `blocks` are the cache blocks of a replica of each pool by name, where an engine counted
    them; of others there are as many as memory leaves, or as the workload says."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        serve: Serve,
        plan: Plan,
        requests: Requests,
        costs: Costs,
        profile: EngineProfile,
        tables: dict[Hashable, IterationCosts] | None = None,
        blocks: Mapping[str, int] = MappingProxyType({}),
    ):
        self.serve, self.profile = serve, profile
        pools = _built(model, cluster, serve, plan, requests, costs, profile, tables, blocks)
        self.apart, self.sigma = _apart(cluster, serve, plan, pools, requests, costs)

    def served(self, requests: Requests) -> ServedRequests:
        """Return the records of requests as their clients see them."""
        router = serving.get("routing", self.serve.engine.routing)
        return served_split(self.apart, requests, router).whole.seen(requests, self.apart.replicas[0].host)

    def drawn(self, requests: Requests) -> Iterator[ServedRequests]:
        """Yield them without any error, then under each draw of the errors."""
        return _under_errors(self.serve, self.apart, requests, self.profile, self.sigma)


def _usage(model: Model, pools: Sequence[_BuiltPool], found: ServedApart, requests: Requests) -> Usage:
    """The use of all devices. A replica that computed prompts made one token of each answer, and one that went on with
    them had all but the last token of what was there then in its cache."""
    span = float(found.whole.end_s.max() - found.whole.arrival_s.min())
    out = []
    for one in pools:
        shares, served = [], []
        for number in one.numbers:
            mine = (found.source == number) | (found.target == number)
            share, records = requests.chosen(np.flatnonzero(mine)), found.each[number].chosen(mine)
            here, there = found.source[mine] == number, found.target[mine] == number
            first, rest = here & ~there, there & ~here
            shares.append(
                msgspec.structs.replace(
                    share,
                    prompt=share.prompt + rest,
                    output=np.where(first, 1, share.output - rest),
                )
            )
            served.append(msgspec.structs.replace(records, cached=np.where(rest, share.prompt, records.cached)))
        used = usage(model, one.cluster, one.pool.plan, one.made, shares, served, span)
        answers = max(1, sum(int(share.output.sum()) for share in shares))
        dtype = one.pool.plan.precision.compute or one.forward.train.dtype
        out.append(PoolUsage(used, _device(one), one.pool.plan.layout.num_ranks, dtype, answers))
    return together(out, int(requests.output.sum()))


def _served_pool(plan: Plan, one: _BuiltPool, found: ServedApart) -> ServedPool:
    mine = [found.each[i] for i in one.numbers]
    spent = sum(served.spent_s for served in mine)
    return ServedPool(
        name=one.pool.name,
        role=role(plan, one.pool.name),
        replicas=one.count,
        devices=one.devices,
        kv_blocks=one.made.blocks,
        peak_kv_blocks=max(served.peak_blocks for served in mine),
        peak_batch=max(served.peak_batch for served in mine),
        iterations=sum(served.iterations for served in mine),
        preemptions=sum(served.evictions for served in mine),
        busy=1.0 - float(spent[5]) / float(spent.sum()) if spent.sum() else 0.0,
    )


def _transfers(found: ServedApart, seen_s: np.ndarray, requests: Requests, pools: Sequence[_BuiltPool]) -> KvTransfers:
    """The caches that went between the pools, and where the time of the requests went until clients saw their ends."""
    went = found.joined_s >= 0
    whole = found.whole
    decoding = np.stack([one.scheduled_s for one in found.each])[found.target, np.arange(len(requests))]
    asked, joined = np.maximum(found.pulled_s, whole.first_s), np.where(went, found.joined_s, whole.first_s)
    asked = np.where(went, asked, whole.first_s)
    begun = np.where(went, decoding, joined)
    stages = {
        "waiting for the prompt": whole.scheduled_s - whole.arrival_s,
        "prompt": whole.first_s - whole.scheduled_s,
        "waiting for room": asked - whole.first_s,
        "sending": joined - asked,
        "waiting for the answer": begun - joined,
        "answer": whole.end_s - begun,
        "connection and reply": seen_s - whole.end_s,
    }
    return KvTransfers(
        requests=int(went.sum()),
        mean_bytes=_mean_bytes(requests.prompt[went], found.target[went], pools),
        moved_s=summary((joined - asked)[went]),
        stages_s={name: float(values.mean()) for name, values in stages.items()},
    )


def _mean_bytes(prompts: np.ndarray, target: np.ndarray, pools: Sequence[_BuiltPool]) -> float:
    """Bytes of the cache of the mean prompt that was sent, as those keep it who received it."""
    total = 0.0
    for one in pools:
        mine = prompts[(target >= one.first) & (target < one.first + one.count)]
        layout = one.forward.plan.layout
        if len(mine):
            tokens = int(mine.mean())
            held = sum(one.forward.request_bytes(stage, tokens) for stage in range(layout.pp))
            total += held * layout.tp * layout.cp * len(mine)
    return total / max(len(prompts), 1)


def _timeline(requests: Requests, found: ServedApart, pools: Sequence[_BuiltPool], who: Identity) -> Timeline:
    """The state of every replica over time, and a record of every request."""
    whole = found.whole
    columns = {
        "replica": found.source,
        "decode_replica": found.target,
        "prompt_tokens": requests.prompt,
        "output_tokens": requests.output,
    }
    columns |= {name: getattr(whole, name) for name in ("arrival_s", "scheduled_s", "first_s")}
    columns |= {"pulled_s": found.pulled_s, "joined_s": found.joined_s}
    columns |= {name: getattr(whole, name) for name in ("end_s", "evicted", "cached")}
    ranks = [
        RankClass(label=f"{one.pool.name} {i}", device=_device(one).name, multiplicity=one.devices)
        for one in pools
        for i in range(one.count)
    ]
    return over_time(ranks, found.each, columns, who)
