"""Replicas whose devices change while they serve: what all governors of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec

from meshwright import serving
from meshwright.answer.latency import DRAWN_PLAINLY, drawn, serving_metrics, spread_over
from meshwright.answer.replica import alone
from meshwright.answer.serving_answer import ServingMetrics
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.cost.part import untuned
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.lower.forward import Forward
from meshwright.lower.place import Mesh
from meshwright.plan import Plan
from meshwright.simulate.partial import PartialCosts
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests, common_prefix
from meshwright.spec.serve import Serve

#: Words of an engine whose parts of an iteration are priced outside of the tables that know parts of devices.
APART = ("borrow", "pairs", "kv_budget", "draft")


class GovernedReplicas(ABC):
    """The replicas of a plan under a governor."""

    def __init__(self, model: Model, cluster: Cluster, serve: Serve, plan: Plan, replica: Replica, costs: Costs):
        self.model, self.cluster, self.serve, self.plan = model, cluster, serve, plan
        self.replica, self.count = replica, plan.layout.dp
        self.ranks = plan.layout.num_ranks // self.count
        self.router = serving.get("routing", serve.engine.routing)
        self._known: dict[tuple[int, int], PartialCosts] = {}

    @abstractmethod
    def served(self, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the requests of every replica that has any, and what became of them.

        Raises:
            MeshwrightError: W012 for requests that the cache can never hold.
        """

    @abstractmethod
    def again(self, replica: Replica, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the same of replicas of other costs, after requests were served or as if they had been."""

    def parts(self, requests: Requests) -> PartialCosts:
        """Return the prices of iterations on parts of the devices."""
        key = int((requests.prompt + requests.output).max()), common_prefix(requests)
        if key not in self._known:
            one, serve = alone(self.plan), self.serve
            forward = Forward(self.model, one, Mesh(one, self.cluster), serve.engine.kv, key[1], serve.expert_routing)
            device = self.cluster.islands[0].device
            self._known[key] = PartialCosts(forward, device, untuned(), self.replica.costs, key[0])
        return self._known[key]

    def with_intervals(self, metrics: ServingMetrics, requests: Requests, profile: EngineProfile) -> ServingMetrics:
        """The metrics with 80% intervals: the first requests served again under draws of the errors of the costs."""
        found = [serving_metrics(self.serve, *one) for one in self.under_errors(requests.first(DRAWN_PLAINLY), profile)]
        return spread_over(metrics, found[0], found[1:])

    def under_errors(
        self, requests: Requests, profile: EngineProfile
    ) -> Iterator[tuple[list[Requests], list[ServedRequests]]]:
        """Yield what becomes of requests without any error, then under each draw of the errors of the costs."""
        for one in (self.replica, *drawn(self.replica, profile)):
            yield self.again(one, requests)


def cannot_govern(plan: Plan, cluster: Cluster, serve: Serve, what: str, place: str) -> list[Diagnostic]:
    """Return W014 for what devices that change do not go with, W013 for an engine that there is not."""
    words, wrong = serve.engine, []
    if plan.several or len(cluster.islands) > 1:
        message = f"{what} and several pools or kinds of devices"
        return [Diagnostic(code="W014", message=message, place=place, help="say one pool on one kind")]
    if cluster.islands[0].device.cores:
        wrong.append((f"{what} and processor cores", "say a cluster of accelerators"))
    usual = msgspec.structs.asdict(type(words)())
    wrong += [(f"{what} and {name}=", "drop one of them") for name in APART if getattr(words, name) != usual[name]]
    if serve.adapters:
        wrong.append((f"{what} and adapters=", "drop one of them"))
    if plan.serving.stream:
        wrong.append((f"{what} and weights that come from elsewhere", "drop weights_from="))
    try:
        if engine_profile(words.profile).iterations:
            wrong.append((f"engine={words.profile} has published times of whole devices alone", "say another engine="))
    except MeshwrightError:
        pass  # it is said where profiles are looked up
    return [Diagnostic(code="W014", message=message, place=place, help=help) for message, help in wrong]
