"""Placements of prefill and decode apart, by DistServe's two algorithms (Zhong et al., OSDI 2024, 2401.09670, section
4).

Where links between nodes are fast (``high``) each half is planned alone: the rate at which a layout keeps the half's
own objective, times to a first token of prompts, times per token of answers whose caches are there at once; then as
many replicas of both as the rate needs. Where they are slow (``low``) both halves lie in one node, so that pairs of
layouts which fit are simulated together, and a pair is repeated. Rates are found by bisection on the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import msgspec
import numpy as np

from meshwright.answer.latency import objectives_kept
from meshwright.answer.replica import built
from meshwright.answer.serving import predict_serving
from meshwright.answer.serving_answer import ServingPrediction
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile, engine_profile
from meshwright.cost.standard import serving_costs
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan, parse
from meshwright.search.serving.evaluate import rate_of
from meshwright.search.serving.space import default, layouts, words
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.serve import refuse_oversized, simulate
from meshwright.simulate.serve_apart import served_answers
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve

#: Strategies: links between nodes are as fast as inside, or both halves lie in one node.
HIGH, LOW = "distserve-high", "distserve-low"
STRATEGIES = (HIGH, LOW)
#: Rates are found to within this share.
TOLERANCE = 0.02
#: Requests of each simulation of a bisection.
SIMULATED = 400


class SplitPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A placement: the words of a replica of each half, how many there are, on how many devices, and the greatest rate
    for each device (requests a second) at which it keeps the objectives. ``plan`` says it on the cluster, "" where that
    has not enough devices for the rate that is asked."""

    prefill: str
    decode: str
    prefills: int
    decodes: int
    devices: int
    rate_per_device: float
    plan: str


class SplitFound(msgspec.Struct, frozen=True, kw_only=True):
    """Placements of both halves, the best first; what each layout of a half does alone, in requests a second for each
    device; and the answer for the best one at the rate that is asked."""

    strategy: str
    placements: tuple[SplitPlacement, ...]
    prefill_rates: dict[str, float]
    decode_rates: dict[str, float]
    answer: ServingPrediction | None

    @property
    def good(self) -> bool:
        """Whether the best placement keeps the objectives at the rate that is asked."""
        return self.answer is not None and self.answer.good

    def to_json(self) -> dict[str, Any]:
        """The placements as plain values, with the answer."""
        found = msgspec.to_builtins(msgspec.structs.replace(self, answer=None))
        return found | {"good": self.good, "answer": self.answer.to_json() if self.answer else None}


def find_split(
    model: Model,
    cluster: Cluster,
    serve: Serve,
    requests: Requests,
    *,
    strategy: str = LOW,
    costs: Costs | None = None,
    profile: EngineProfile | None = None,
) -> SplitFound:
    """Return the placements of both halves on a cluster of equal devices, by requests a second for each device.

    Raises:
        MeshwrightError: R014 without bounds on first tokens and on times per token, or without a rate.
    """
    bounds = serve.common().objectives
    if not {"ttft_s", "tpot_s"} <= bounds.keys() or not np.isfinite(rate_of(requests)) or len(cluster.islands) > 1:
        message = "prefill and decode are placed for requests at a rate, with ttft= and tpot=, on devices of one kind"
        help = "add --slo ttft=500ms,tpot=50ms@p90, and say rate= or trace="
        raise MeshwrightError.one("R014", message, place=f"--strategy {strategy}", help=help)
    planner = _Planner(model, cluster, serve, requests, costs or serving_costs(), profile)
    found = planner.high() if strategy == HIGH else planner.low()
    most = max((one.rate_per_device for one in found), default=0.0) / (1 + TOLERANCE)  # as good: fewer devices first
    found.sort(key=lambda one: (one.rate_per_device < most and -one.rate_per_device, one.devices, -one.rate_per_device))
    best = next((one for one in found if one.plan), None)
    answer = None
    if best is not None:
        answer = predict_serving(model, cluster, serve, parse(best.plan), requests=requests, detail=False)
    return SplitFound(
        strategy=strategy,
        placements=tuple(found),
        prefill_rates=planner.rates[0],
        decode_rates=planner.rates[1],
        answer=answer,
    )


class _Planner:
    """The layouts of a question, and the rates of each half alone."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        serve: Serve,
        requests: Requests,
        costs: Costs,
        profile: EngineProfile | None,
    ):
        self.model, self.cluster, self.serve, self.costs = model, cluster, serve, costs
        self.profile = profile or engine_profile(serve.engine.profile)
        self.asked, self.requests = rate_of(requests), requests.first(SIMULATED)
        found = layouts(default(model, cluster, serve), model, cluster, serve)
        self.layouts = [plan for plan in found if plan.serving == Plan().serving]
        self.tables: dict[Any, IterationCosts] = {}
        self.rates: tuple[dict[str, float], dict[str, float]] = ({}, {})

    def high(self) -> list[SplitPlacement]:
        """Every pair of layouts, by what each half does alone."""
        halves = [[(plan, self.alone(plan, half)) for plan in self.layouts] for half in (0, 1)]
        halves = [[(plan, rate) for plan, rate in half if rate > 0] for half in halves]
        found = [self._placed(*first, *second) for first in halves[0] for second in halves[1]]
        return [one for one in found if one is not None]

    def _placed(self, prefill: Plan, first: float, decode: Plan, second: float) -> SplitPlacement | None:
        """As many replicas of both halves as the rate needs; None where not even one of each has devices."""
        if prefill.layout.num_ranks + decode.layout.num_ranks > self.cluster.num_devices:
            return None
        n, m = (max(1, ceil(self.asked / rate * (1 - 1e-9))) for rate in (first, second))
        devices = n * prefill.layout.num_ranks + m * decode.layout.num_ranks
        a, b = said(prefill), said(decode)
        middle, end = n * prefill.layout.num_ranks, devices
        node = self.cluster.islands[0].domain_size
        if middle > node or end - middle > node:  # pools of several nodes begin at one
            middle = ceil(middle / node) * node
            end = middle + m * decode.layout.num_ranks
        plan = f"prefill=[{a} dp{n} on=0:{n * prefill.layout.num_ranks}] + decode=[{b} dp{m} on={middle}:{end}]"
        plan = f"{plan} prefill->decode:kv" if end <= self.cluster.num_devices else ""
        slower = min(n * first, m * second) / devices
        return SplitPlacement(
            prefill=a, decode=b, prefills=n, decodes=m, devices=devices, rate_per_device=slower, plan=plan
        )

    def low(self) -> list[SplitPlacement]:
        """The pairs of layouts that fit into a node, simulated together and repeated. One of which a half alone does
        less for each device than another pair does is left out."""
        node = min(self.cluster.islands[0].domain_size, self.cluster.num_devices)
        bounds = []
        for prefill in self.layouts:
            for decode in self.layouts:
                size = prefill.layout.num_ranks + decode.layout.num_ranks
                most = min(self.alone(prefill, 0), self.alone(decode, 1)) if size <= node else 0.0
                if most:
                    bounds.append((most / size, said(prefill), said(decode), prefill, decode, most))
        out: list[SplitPlacement] = []
        for bound, _, _, prefill, decode, most in sorted(bounds, key=lambda one: (-one[0], *one[1:3])):
            if bound * (1 + TOLERANCE) < max((one.rate_per_device for one in out), default=0.0):
                break
            rate = self._bisected(lambda speed, a=prefill, b=decode: self._together(a, b, speed), most)
            if rate:
                out.append(self._repeated(prefill, decode, rate, node))
        return out

    def _repeated(self, prefill: Plan, decode: Plan, rate: float, node: int) -> SplitPlacement:
        """A pair as often as the rate needs, each in a node with as many others as fit."""
        count = max(1, ceil(self.asked / rate * (1 - 1e-9)))
        text = self._pairs(prefill, decode, count, node)
        size = prefill.layout.num_ranks + decode.layout.num_ranks
        return SplitPlacement(
            prefill=said(prefill),
            decode=said(decode),
            prefills=count,
            decodes=count,
            devices=count * size,
            rate_per_device=rate / size,
            plan=text,
        )

    def _pairs(self, prefill: Plan, decode: Plan, count: int, node: int) -> str:
        """The words of so many pairs; "" where there are not devices for them."""
        first, second = prefill.layout.num_ranks, decode.layout.num_ranks
        each, pools, links = node // (first + second), [], []
        for i in range(count):
            begin = i // each * node + i % each * (first + second)
            if begin + first + second > self.cluster.num_devices:
                return ""
            mark = "" if count == 1 else str(i)
            pools.append(f"prefill{mark}=[{said(prefill)} dp1 on={begin}:{begin + first}]")
            pools.append(f"decode{mark}=[{said(decode)} dp1 on={begin + first}:{begin + first + second}]")
            links.append(f"prefill{mark}->decode{mark}:kv")
        return " ".join([" + ".join(pools), *links])

    def alone(self, plan: Plan, half: int) -> float:
        """The greatest rate of requests at which one replica of a layout keeps the objective of a half, 0 for none."""
        name = said(plan)
        if name not in self.rates[half]:
            rate = self._alone(plan, half)
            self.rates[half][name] = rate / plan.layout.num_ranks
        return self.rates[half][name] * plan.layout.num_ranks

    def _alone(self, plan: Plan, half: int) -> float:
        requests = self.requests
        if half == 0:
            requests = msgspec.structs.replace(requests, output=np.ones_like(requests.output))
        made = built(
            self.model, self.cluster, self.serve, plan, requests, self.costs, self.profile, self.tables, split=False
        )
        if not made.fits:
            return 0.0
        try:
            refuse_oversized(made.replica, requests)
        except MeshwrightError:
            return 0.0
        serves: Callable[[Replica, Requests], ServedRequests] = (simulate, served_answers)[half]

        def good(speed: float) -> bool:
            faster = requests.faster(speed)
            return self._kept([faster], [serves(made.replica, faster)], ("ttft_s", "tpot_s")[half])

        return self._bisected(good)

    def _together(self, prefill: Plan, decode: Plan, speed: float) -> bool:
        """Whether a pair of replicas in a node keeps both objectives."""
        text = self._pairs(prefill, decode, 1, prefill.layout.num_ranks + decode.layout.num_ranks)
        found = predict_serving(
            self.model,
            self.cluster,
            self.serve,
            parse(text),
            requests=self.requests.faster(speed),
            costs=self.costs,
            profile=self.profile,
            detail=False,
            tables=self.tables,
        )
        return found.good

    def _kept(self, shares: list[Requests], served: list[ServedRequests], metric: str) -> bool:
        return all(one.met for one in objectives_kept(self.serve, shares, served) if one.metric == metric)

    def _bisected(self, good: Callable[[float], bool], most: float | None = None) -> float:
        """The greatest rate at which something is kept, in requests a second, to within :data:`TOLERANCE`; one that is
        missed at a rate is taken to be missed at greater ones."""
        base = rate_of(self.requests)
        low, high = 0.0, 1.0 if most is None else most / base
        for _ in _steps():
            if not good(high):
                break
            low, high = high, high * 2
        while not low:
            low, high = (high / 2, high) if good(high / 2) else (0.0, high / 2)
            if high < 1e-4:
                return 0.0
        while high > low * (1 + TOLERANCE):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if good(middle) else (low, middle)
        return low * base


def said(plan: Plan) -> str:
    """Return the words of a replica's plan, whatever their number; ``tp1`` where there is nothing to say."""
    open_ = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, dp=0))
    return "tp1" if open_ == parse("tp1") else words(open_)


def _steps() -> Iterator[int]:
    """Doublings until all requests come at once, as good as."""
    return iter(range(20))
