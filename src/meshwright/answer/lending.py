"""Replicas that lend one another cache blocks: the ways between them, and what becomes of requests that they serve."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import numpy as np

from meshwright import serving
from meshwright.answer.latency import DRAWN_PLAINLY, NUM_DRAWS, drawn, serving_metrics, spread_over
from meshwright.answer.replica import alone
from meshwright.answer.serving_answer import ServingMetrics
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.errors import Diagnostic
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import Layout, Plan
from meshwright.simulate.serve import refuse_oversized
from meshwright.simulate.serve_lending import AwayPath, LentPool
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.work import Collective, Group

#: Bytes of the maximum and the sum of a softmax that go with each head's partial result, in fp32.
SOFTMAX_BYTES = 8.0
#: A message so short that its price is its latency.
NO_BYTES = 1e-3


class Lenders:
    """The replicas of a plan that lend one another blocks, and the ways between them."""

    def __init__(self, model: Model, cluster: Cluster, serve: Serve, plan: Plan, replica: Replica, costs: Costs):
        self.replica, self.serve, self.count = replica, serve, plan.layout.dp
        self.router = serving.get("routing", serve.engine.routing)
        one = alone(plan)
        forward = Forward(model, one, Mesh(one, cluster), serve.engine.kv, routing=serve.expert_routing)
        mesh = Mesh(Plan(layout=Layout(dp=cluster.num_devices)), cluster)
        size = plan.layout.num_ranks // self.count
        self.sigma = 0.0
        known: dict[Group, AwayPath] = {}
        self.paths: dict[tuple[int, int], AwayPath] = {}
        for i in range(self.count):
            for j in range(self.count):
                if i == j:
                    continue
                group = mesh.pair(i * size, j * size)
                if group not in known:
                    known[group] = self._path(forward, cluster, group, costs)
                self.paths[i, j] = known[group]

    def _path(self, forward: Forward, cluster: Cluster, group: Group, costs: Costs) -> AwayPath:
        """The way between the ranks of two replicas that hold the same heads."""
        device, tp = cluster.islands[0].device, forward.plan.layout.tp
        element = DTYPE_BYTES[forward.plan.precision.compute or forward.train.dtype]
        self.sigma = max(self.sigma, costs.price(_message(NO_BYTES, group), device).sigma)

        def sent(num_bytes: float) -> float:
            return costs.price(_message(num_bytes, group), device).seconds

        @cache
        def asks(tokens: int) -> float:
            seconds = 0.0
            for mixing in forward.mixing:
                spec, heads = mixing.spec, mixing.spec.heads / tp
                there = heads * spec.head_dim * element
                back = heads * (spec.v_head_dim * element + SOFTMAX_BYTES)
                seconds += mixing.layers * (sent(tokens * there) + sent(tokens * back))
            return seconds

        return AwayPath(asks, cache(lambda tokens: sent(tokens * forward.kv_bytes(0))))

    def served(self, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the requests of every replica that has any, and what became of them.

        Raises:
            MeshwrightError: W012 for requests that the caches of all replicas together can never hold.
        """
        refuse_oversized(self.replica, requests, self.count)
        return LentPool(self.replica, self.count, requests, self.router, self.paths).served()

    def with_intervals(self, metrics: ServingMetrics, requests: Requests, profile: EngineProfile) -> ServingMetrics:
        """The metrics with 80% intervals: the first requests served again under draws of the errors of all replicas'
        costs, which are drawn alike, and of the links."""
        first = requests.first(DRAWN_PLAINLY)
        found = [serving_metrics(self.serve, *served) for served in self.under_errors(first, profile)]
        return spread_over(metrics, found[0], found[1:])

    def under_errors(
        self, requests: Requests, profile: EngineProfile
    ) -> Iterator[tuple[list[Requests], list[ServedRequests]]]:
        """Yield what becomes of requests without any error, then under each draw of the errors."""
        normal = np.array([NormalDist().inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
        links = np.exp(np.random.default_rng(1).permutation(normal) * self.sigma).tolist()
        for one, factor in zip((self.replica, *drawn(self.replica, profile)), (1.0, *links), strict=True):
            paths = {way: path.slower(factor) for way, path in self.paths.items()}
            yield LentPool(one, self.count, requests, self.router, paths).served()


def _message(num_bytes: float, group: Group) -> Collective:
    return Collective(op="send", num_bytes=num_bytes, group=group)


def cannot_lend(plan: Plan, model: Model, serve: Serve) -> Iterator[Diagnostic]:
    """Yield W014 for what replicas that lend one another blocks do not know yet."""
    words, layout = serve.engine, plan.layout
    if not words.borrow:
        return
    place = "--serve borrow=yes"
    if plan.several or layout.dp == 1:
        what = "several pools" if plan.several else "one replica"
        yield _bad(f"blocks are borrowed from other replicas, and the plan has {what}", place, "say dp2, or more")
    said = [f"{name}{getattr(layout, name)}" for name in ("pp", "adp", "cp") if getattr(layout, name) > 1]
    said += ["nano" if plan.serving.nano > 1 else "", "streams" if plan.serving.streams > 1 else ""]
    said += ["shared_prefix=once" if plan.serving.prefix == "once" else ""]
    said += ["prefix_cache=yes" if words.prefix_cache else "", "chunk_cache=" if words.chunk_cache else ""]
    said += ["kv_budget=" if words.kv_budget else "", "draft=" if words.draft else ""]
    said += ["preempt=swap" if words.preempt == "swap" else "", "adapters=" if serve.adapters else ""]
    for one in filter(None, said):
        yield _bad(
            f"borrowed blocks and {one}", place, f"drop one of them: tp and dp go with borrow=, and {one} not yet"
        )
    specs = model.attentions
    if not specs or any(block.mixer is not None for block in model.blocks):
        yield _bad(f"{model.name} has layers that keep no keys and values", place, "drop borrow=")
    elif any(spec.window or spec.kv_lora_rank or spec.index_top_k for spec in specs):
        yield _bad(f"the layers of {model.name} keep a window, a latent or choose tokens", place, "drop borrow=")


def _bad(message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="W014", message=message, place=place, help=help)
