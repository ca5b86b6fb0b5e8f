"""Replicas in pairs that hold copies of each other's caches: the ways between them, and what becomes of requests."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.kv_paths import kv_path
from meshwright.answer.latency import DRAWN_PLAINLY, NUM_DRAWS, drawn, serving_metrics, spread_over
from meshwright.answer.replica import alone
from meshwright.answer.serving_answer import ServingMetrics
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.errors import Diagnostic
from meshwright.lower.forward import Forward
from meshwright.lower.handover import KvCrossing, pairs
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan, Pool
from meshwright.simulate.kv_links import KvPath
from meshwright.simulate.serve import refuse_oversized
from meshwright.simulate.serve_paired import served_paired
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve

#: Columns of records that are of both replicas.
TIMES = ("arrival_s", "scheduled_s", "first_s", "end_s", "evicted", "cached")


class PairedReplicas:
    """The replicas of a plan in pairs, neighbours on the cluster, and the ways between them."""

    def __init__(self, model: Model, cluster: Cluster, serve: Serve, plan: Plan, replica: Replica, costs: Costs):
        self.replica, self.serve, self.count = replica, serve, plan.layout.dp
        self.router = serving.get("routing", serve.engine.routing)
        one = alone(plan)
        forward = Forward(model, one, Mesh(one, cluster), serve.engine.kv, routing=serve.expert_routing)
        mesh = Mesh(Plan(layout=Layout(dp=cluster.num_devices)), cluster)
        size, between = plan.layout.num_ranks // self.count, KvCrossing(forward, forward)
        pools = [Pool(devices=(i * size, (i + 1) * size), plan=one) for i in range(self.count)]
        device, self.sigma = cluster.islands[0].device, 0.0
        self.paths: dict[tuple[int, int], KvPath] = {}
        for i in range(self.count):
            (groups,) = pairs(pools[i], pools[i ^ 1], between, mesh).values()
            self.paths[i, i ^ 1], sigma = kv_path(between, groups, (device, device), costs, 1024)
            self.sigma = max(self.sigma, sigma)

    def served(self, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the requests of every replica that answered any, and what became of them.

        Raises:
            MeshwrightError: W012 for requests that the cache can never hold.
        """
        refuse_oversized(self.replica, requests)
        return self._served(self.replica, self.paths, requests)

    def _served(
        self, replica: Replica, paths: dict[tuple[int, int], KvPath], requests: Requests
    ) -> tuple[list[Requests], list[ServedRequests]]:
        found = served_paired(replica, self.count, requests, self.router, paths)
        shares, served = [], []
        for number, one in enumerate(found.each):  # every request as one of whoever generated its last token
            mine = np.flatnonzero(found.target == number)
            if not len(mine):
                continue
            whole = {name: getattr(found.whole, name) for name in TIMES}
            shares.append(requests.chosen(mine))
            served.append(msgspec.structs.replace(one, **whole).chosen(mine).seen(shares[-1], replica.host))
        return shares, served

    def with_intervals(self, metrics: ServingMetrics, requests: Requests, profile: EngineProfile) -> ServingMetrics:
        """The metrics with 80% intervals: the first requests served again under draws of the errors."""
        first = requests.first(DRAWN_PLAINLY)
        found = [serving_metrics(self.serve, *served) for served in self.under_errors(first, profile)]
        return spread_over(metrics, found[0], found[1:])

    def under_errors(
        self, requests: Requests, profile: EngineProfile
    ) -> Iterator[tuple[list[Requests], list[ServedRequests]]]:
        """Yield what becomes of requests without any error, then under each draw of the errors of all replicas' costs,
        which are drawn alike, and of the links."""
        normal = np.array([NormalDist().inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
        links = np.exp(np.random.default_rng(1).permutation(normal) * self.sigma).tolist()
        for one, factor in zip((self.replica, *drawn(self.replica, profile)), (1.0, *links), strict=True):
            yield self._served(one, {way: path.slower(factor) for way, path in self.paths.items()}, requests)


def cannot_pair(plan: Plan, serve: Serve) -> Iterator[Diagnostic]:
    """Yield W014 for what replicas in pairs do not know."""
    words = serve.engine
    if not words.pairs:
        return
    policy = serving.get("batching", words.policy)
    wrong = []
    if plan.several or plan.layout.dp % 2:
        what = "several pools" if plan.several else f"dp{plan.layout.dp}"
        wrong.append((f"replicas work in pairs, and the plan has {what}", "say dp2, dp4 or more"))
    if policy.reserves or not getattr(policy, "steady", True):
        message = f"pairs hand requests over between iterations, and policy={words.policy} keeps its own"
        wrong.append((message, "say policy=vllm-v1, vllm-v0 or sarathi"))
    usual = msgspec.structs.asdict(type(words)())
    for name in ("borrow", "prefix_cache", "chunk_cache", "kv_budget", "draft", "preempt"):
        if getattr(words, name) != usual[name]:
            wrong.append((f"replicas in pairs and {name}=", "drop one of them"))
    if serve.adapters or serve.certain:
        wrong.append(("replicas in pairs and adapters= or certain=", "drop one of them"))
    for message, help in wrong:
        yield Diagnostic(code="W014", message=message, place="--serve pairs=yes", help=help)
