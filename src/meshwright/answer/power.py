"""A row of servers behind one power supply: how many more of them it feeds, and what that costs whose requests.

POLCA's question (Patel et al. 2023, 2308.12908): a supply that is made for servers at their rated power feeds more of
them, as they hardly ever draw that much at the same time; where they would, clocks are capped.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import floor

import numpy as np

from meshwright import serving
from meshwright.answer.governed import GovernedReplicas, cannot_govern
from meshwright.answer.latency import kept_objectives, times_of_all
from meshwright.answer.serving_answer import PowerAnswer
from meshwright.cost import Costs
from meshwright.cost.power import MEMORY_SHARE, MEMORY_SHARES, draw
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan import Plan
from meshwright.serving.polca import Polca
from meshwright.simulate.serve import refuse_oversized
from meshwright.simulate.serve_governed import GovernedPool
from meshwright.simulate.serve_powered import CappedRow
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve

#: Most servers that are tried, as a multiple of those that the supply feeds at their rated power.
MOST_SERVERS = 3.0


class PoweredReplicas(GovernedReplicas):
    """The replicas of a plan as servers of a row."""

    def __init__(self, model: Model, cluster: Cluster, serve: Serve, plan: Plan, replica: Replica, costs: Costs):
        super().__init__(model, cluster, serve, plan, replica, costs)
        assert serve.engine.power is not None
        self.words = serve.engine.power
        self.policy: Polca = serving.get("power", self.words.policy)
        node = cluster.islands[0].node
        self.device, self.host_w = cluster.islands[0].device, node.power_w / node.devices
        rated = self.count * self.ranks * (float(self.device.tdp_w or 0.0) + self.host_w)
        self.budget_w = self.words.budget * rated

    def served(self, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the requests of every server that has any, and what became of them."""
        refuse_oversized(self.replica, requests)
        return self.again(self.replica, requests)

    def again(self, replica: Replica, requests: Requests) -> tuple[list[Requests], list[ServedRequests]]:
        """Return the same of servers of other costs."""
        return self._pool(replica, self.count, requests, self.policy, MEMORY_SHARE).served()

    def _pool(self, replica: Replica, servers: int, requests: Requests, policy: Polca, memory: float) -> GovernedPool:
        """A simulation of so many servers, for as many requests a second each."""
        found = draw(self.device, memory)
        assert found is not None
        sizes = {"devices": self.ranks, "host_w": self.host_w, "replicas": servers, "budget_w": self.budget_w}
        sizes["acts_s"] = self.words.acts_s
        row = CappedRow(policy, found, **sizes, num_low=round(servers * self.words.low))
        faster = requests.faster(servers / self.count)
        return GovernedPool(replica, servers, faster, self.router, self.parts(requests), row)

    def answer(self, requests: Requests) -> PowerAnswer:
        """Return what the row draws with the plan's servers, and the most servers that it feeds."""
        own = self._row(requests, self.count, MEMORY_SHARE)
        most = self._most(requests, MEMORY_SHARE)
        around = [self._most(requests, memory) for memory in MEMORY_SHARES]
        row = self._row(requests, most, MEMORY_SHARE) if most else own
        low, high = self._slower(requests, most) if most else (1.0, 1.0)
        seconds = row.seconds or 1.0
        rated = self.budget_w / (self.ranks * (float(self.device.tdp_w or 0.0) + self.host_w))
        return PowerAnswer(
            policy=self.policy.name,
            budget_w=self.budget_w,
            rated_servers=floor(rated + 1e-9),
            servers=self.count,
            peak_w=own.peak_w,
            mean_w=own.joules / own.seconds if own.seconds else 0.0,
            most_servers=most,
            most_interval=(min(around), max(around)),
            most_peak_w=row.peak_w,
            capped_low=(row.passed_s[1] + row.passed_s[2]) / seconds,
            capped_all=row.passed_s[2] / seconds,
            slower_low=low,
            slower_high=high,
        )

    def _row(self, requests: Requests, servers: int, memory: float) -> CappedRow:
        return self._run(requests, servers, memory)[0]

    def _run(self, requests: Requests, servers: int, memory: float) -> tuple[CappedRow, bool]:
        """The row with so many servers, and whether its objectives are kept."""
        pool = self._pool(self.replica, servers, requests, self.policy, memory)
        shares, served = pool.served()
        share = max((one.share for bounds in self.serve.objective_classes for one in bounds.values()), default=0.0)
        kept = kept_objectives(self.serve, shares, times_of_all(shares, served)).mean() >= share
        assert isinstance(pool.governor, CappedRow)
        return pool.governor, bool(kept)

    def _most(self, requests: Requests, memory: float) -> int:
        """The most servers that the row feeds without the brake, with their objectives kept; 0 where it feeds none. A
        row with more servers draws more: found by bisection."""

        @cache
        def feeds(servers: int) -> bool:
            row, kept = self._run(requests, servers, memory)
            return kept and not row.passed_s[3] and row.peak_w <= self.budget_w

        rated = self.budget_w / (self.ranks * (float(self.device.tdp_w or 0.0) + self.host_w))
        low, high = 0, max(1, floor(MOST_SERVERS * rated)) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if feeds(middle) else (low, middle)
        return low

    def _slower(self, requests: Requests, servers: int) -> tuple[float, float]:
        """How many times as long requests take from arrival to last token with caps as without, on servers of low
        priority and on the others."""
        free = Polca(name="free", first=np.inf, second=np.inf, brake=self.policy.cap(0))
        found = []
        for policy in (self.policy, free):
            pool = self._pool(self.replica, servers, requests, policy, MEMORY_SHARE)
            pool.served()
            where, row = pool.pool.where, pool.governor
            assert isinstance(row, CappedRow)
            ends, came = (np.array([getattr(clock, name) for clock in pool.clocks]) for name in ("end", "arrival"))
            at = np.arange(len(where))
            spent = ends[where, at] - came[where, at]
            found.append([spent[where < row.num_low], spent[where >= row.num_low]])
        return tuple(float(a.mean() / b.mean()) if len(a) and len(b) else 1.0 for a, b in zip(*found))


def beyond_supply(row: PowerAnswer | None) -> tuple[str, ...]:
    """Return a warning where a plan's own servers draw more than their supply gives, whatever clocks are."""
    if row is None or row.peak_w <= row.budget_w:
        return ()
    drawn, may = row.peak_w / 1e3, row.budget_w / 1e3
    return (f"the row draws up to {drawn:.4g} kW of the {may:.4g} kW that it may: fewer servers, or a larger budget=",)


def cannot_power(plan: Plan, cluster: Cluster, serve: Serve) -> Iterator[Diagnostic]:
    """Yield W014 for what a row of servers does not go with, W013 for a policy that there is not."""
    row = serve.engine.power
    if row is None:
        return
    place = f"--serve power={row.text()}"
    wrong = cannot_govern(plan, cluster, serve, "the power of a row", place)
    yield from wrong
    if serve.engine.beside is not None:
        message = "the power of a row and jobs beside requests"
        yield Diagnostic(code="W014", message=message, place=place, help="drop one of them")
    device = cluster.islands[0].device
    if not wrong and draw(device) is None:
        message = f"the rated power of {device.name} is not known"
        yield Diagnostic(code="W014", message=message, place=place, help="say a device of the catalog that has tdp_w")
    try:
        serving.get("power", row.policy)
    except MeshwrightError as error:
        yield from error.diagnostics
