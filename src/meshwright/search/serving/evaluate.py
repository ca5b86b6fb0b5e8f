"""Evaluate serving candidates: each simulated as ``predict --serve`` does it, and no further than the verdict needs.

Replicas are engines of their own, simulated one after the other; where so many requests have missed an objective that
its percentile is lost whatever the others do, the rest is left out. Prices are shared by all candidates whose replicas
are alike, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright import serving
from meshwright.answer.beside import beside_bytes
from meshwright.answer.latency import DRAWN_PLAINLY, Times, drawn, objectives_kept, serving_metrics, times_of
from meshwright.answer.replica import BuiltReplica, built, dealt, served_by
from meshwright.answer.serving import bound_together
from meshwright.answer.serving_answer import Kept, ServingMetrics
from meshwright.answer.serving_pools import ServedPools
from meshwright.cost import Costs
from meshwright.cost.engine import EngineProfile
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.quantity import gibibytes, latency
from meshwright.search.serving.bounds import ReplicaBounds, most_misses
from meshwright.search.serving.space import Phase, ServingCandidate
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.serve import refuse_oversized, simulate
from meshwright.simulate.served import Replica, ServedRequests
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.requests import Requests
from meshwright.spec.serve import EngineWords, Serve

#: Requests that are served again under draws of errors.
DRAWN = 4000
#: The same of pools, whose replicas are simulated together.
DRAWN_APART = 2000
#: The rate of a plan that keeps its objectives is known within this share.
TOLERANCE = 0.01
#: Factors on the rate beyond which all requests come at once, as good as.
MOST_SPEED = 1e6


class Judged(NamedTuple):
    """The verdict on a candidate: whether it keeps every objective, the largest value over its bound (infinite where
    the simulation ended early), why not, and the metrics (None where it ended early)."""

    good: bool
    ratio: float
    why: str
    metrics: ServingMetrics | None


class ServingEvaluator:
    """The candidates of one question on one cluster."""

    def __init__(
        self, model: Model, cluster: Cluster, serve: Serve, requests: Requests, costs: Costs, profile: EngineProfile
    ):
        self.model, self.cluster, self.serve, self.requests = model, cluster, serve, requests
        self.costs, self.profile = costs, profile
        self.tables: dict[Hashable, IterationCosts] = {}
        self.simulated = 0
        self._built: dict[tuple[Plan, EngineWords], BuiltReplica] = {}
        self._draws: dict[tuple[ServingCandidate, float], np.ndarray] = {}

    def built(self, phase: Phase, engine: EngineWords) -> BuiltReplica:
        """Return the replica of a phase."""
        plan = phase.plan
        if engine.borrow:  # others' caches count
            plan = msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, dp=phase.replicas))
        key = (plan, engine)
        if key not in self._built:
            serve = msgspec.structs.replace(self.serve, engine=engine)
            self._built[key] = built(
                self.model,
                self.cluster,
                serve,
                plan,
                self.requests,
                self.costs,
                self.profile,
                self.tables,
                split=False,
                taken=beside_bytes(serve, self.cluster),
            )
        return self._built[key]

    def bounds(self, phase: Phase, engine: EngineWords) -> ReplicaBounds:
        """Return the bounds of the replicas of a phase, which has room for them."""
        return ReplicaBounds(self.built(phase, engine).replica, self.requests, self.serve.common())

    def no_room(self, phase: Phase, engine: EngineWords) -> str:
        """Return why a replica cannot hold its weights or its longest request; "" where it can."""
        made = self.built(phase, engine)
        if not made.fits:
            tight = min(made.memory, key=lambda rank: rank.headroom_bytes)
            held = sum(size for name, size in tight.alive.items() if name != "keys and values")
            room = tight.capacity_bytes * self.serve.engine.memory
            return f"{gibibytes(held)} without the cache of a request, and {gibibytes(room)} are for serving"
        try:
            refuse_oversized(made.replica, self.requests, phase.replicas if engine.borrow else 1)
        except MeshwrightError as error:
            return error.diagnostics[0].message
        return ""

    def judged(self, candidate: ServingCandidate, speed: float = 1.0, *, whole: bool = False) -> Judged:
        """Return the verdict on a candidate, with arrivals `speed` times as fast; of the `whole` simulation even where
        it is lost before."""
        serve, requests = candidate.over(self.serve), self.requests.faster(speed)
        self.simulated += 1
        if candidate.pools is not None:
            return self._judged_apart(candidate.pools, serve, requests, whole)
        if candidate.engine.together:
            return self._judged_together(candidate, serve, requests)
        (phase,) = candidate.phases
        replica = self.built(phase, candidate.engine).replica
        router = serving.get("routing", serve.engine.routing)
        if phase.replicas > 1 and (router.looks or len(requests.after)):
            shares, served = served_by(serve, replica, requests, phase.replicas)
        else:
            shares, served = dealt(serve, requests, phase.replicas), []
            lost = _Misses(serve, requests)
            why = "" if whole else self._soon(replica, serve, requests, phase.replicas)
            if why:
                return Judged(False, np.inf, why, None)
            for share in shares:
                served.append(simulate(replica, share))
                why = lost.after(times_of(share, served[-1]))
                if why and not whole and len(served) < len(shares):
                    return Judged(False, np.inf, why, None)
        return _verdict(serve, shares, served)

    def _judged_apart(self, plan: Plan, serve: Serve, requests: Requests, whole: bool) -> Judged:
        """The verdict on pools: of the first requests where these lose an objective already."""
        pools = ServedPools(self.model, self.cluster, serve, plan, self.requests, self.costs, self.profile, self.tables)
        lost, count = _Misses(serve, requests), self._few(serve, requests)
        if count and not whole:
            first = requests.first(count)
            why = lost.after(_known_at(float(requests.arrival_s[count]), first, pools.served(first)))
            if why:
                return Judged(False, np.inf, why, None)
        return _verdict(serve, [requests], [pools.served(requests)])

    def _judged_together(self, candidate: ServingCandidate, serve: Serve, requests: Requests) -> Judged:
        """The verdict on replicas that have to know of one another."""
        (phase,) = candidate.phases
        why = self.no_room(phase, candidate.engine)
        if why:
            return Judged(False, np.inf, why, None)
        replica = self.built(phase, candidate.engine).replica
        together = bound_together(self.model, self.cluster, serve, candidate.plan, replica, self.costs)
        return _verdict(serve, *together.served(requests))

    @staticmethod
    def _few(serve: Serve, requests: Requests) -> int:
        """How many of the first requests may lose an objective for all; 0 where that is no less work."""
        count = int(1.5 * min(_Misses(serve, requests).left.values(), default=len(requests))) + 100
        return 0 if 2 * count > len(requests) or requests.concurrency else count

    def _soon(self, replica: Replica, serve: Serve, requests: Requests, replicas: int) -> str:
        """Return which objective is lost by when the first requests have come, "" where none is.

        Nobody knows of requests to come, so that until the first one that is left out arrives everything is as it is
        with all of them: who waits for longer than a bound then misses it."""
        lost = _Misses(serve, requests)
        count = self._few(serve, requests)
        if not count:
            return ""
        until = float(requests.arrival_s[count])
        for share in dealt(serve, requests.first(count), replicas):
            why = lost.after(_known_at(until, share, simulate(replica, share)))
            if why:
                return why
        return ""

    def most_rate(
        self, candidate: ServingCandidate, least: float = 0.0, heard: Callable[[], None] = lambda: None
    ) -> float:
        """Return the greatest factor on the rate at which a candidate keeps every objective, to within
        :data:`TOLERANCE`, by bisection; 0 where it keeps them at none above `least`. A plan that misses an objective
        at a rate is taken to miss it at greater ones. `heard` is called before every simulation."""

        def good(speed: float) -> bool:
            heard()
            return self.judged(candidate, speed).good

        most = MOST_SPEED
        if candidate.pools is None:
            (phase,) = candidate.phases
            most = min(self.bounds(phase, candidate.engine).most_speed(phase.replicas), most)
        low = least * (1 + TOLERANCE)
        if low and (low > most or not good(low)):
            return 0.0
        high = max(low, min(most, 1.0)) or 1.0
        while high < most and good(high):
            low, high = high, min(most, high * 2)
        if high >= most and good(most):
            return most
        while not low:  # nothing is known to be kept yet
            half = high / 2
            if half < 1e-4:
                return 0.0
            low, high = (half, high) if good(half) else (0.0, half)
        while high > low * (1 + TOLERANCE):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if good(middle) else (low, middle)
        return low

    def draws(self, candidate: ServingCandidate, speed: float = 1.0) -> np.ndarray:
        """Return the largest value over its bound of the first requests under draws of the errors of the costs, the
        same errors for every candidate: [draws], the first without any error."""
        if (candidate, speed) not in self._draws:
            self._draws[candidate, speed] = np.array(self._drawn(candidate, speed))
        return self._draws[candidate, speed]

    def _drawn(self, candidate: ServingCandidate, speed: float) -> list[float]:
        serve, requests = candidate.over(self.serve), self.requests.faster(speed)
        if candidate.pools is not None:
            first = requests.first(DRAWN_APART)
            asked = (self.model, self.cluster, serve, candidate.pools, self.requests, self.costs, self.profile)
            return [_worst(serve, first, one) for one in ServedPools(*asked).drawn(first)]
        (phase,) = candidate.phases
        if candidate.engine.together:
            return [_worst_of(serve, *served) for served in self._drawn_together(candidate, requests)]
        first = requests.first(DRAWN * phase.replicas)
        asked = (self.model, self.cluster, serve, phase.plan, self.requests, self.costs, self.profile)
        replica = built(*asked).replica
        share = dealt(serve, first, phase.replicas)[0]
        return [_ratio(serve, one, share) for one in [replica, *drawn(replica, self.profile)]]

    def _drawn_together(
        self, candidate: ServingCandidate, requests: Requests
    ) -> Iterator[tuple[list[Requests], list[ServedRequests]]]:
        """Return what replicas that know of one another served, without any error and under each draw."""
        serve, (phase,) = candidate.over(self.serve), candidate.phases
        asked = (self.model, self.cluster, serve, candidate.plan, self.requests, self.costs, self.profile)
        replica = built(*asked, taken=beside_bytes(serve, self.cluster)).replica
        together = bound_together(self.model, self.cluster, serve, candidate.plan, replica, self.costs)
        return together.under_errors(requests.first(DRAWN_PLAINLY * phase.replicas), self.profile)


def _known_at(until: float, requests: Requests, served: ServedRequests) -> Times:
    """Return the times of requests as far as they are known at a moment: what has not come by then takes until then at
    least, and nothing is known of the tokens of an answer that is not complete."""
    seen = times_of(requests, served)
    first, end = (np.minimum(at, until) - served.arrival_s for at in (served.first_s, served.end_s))
    return seen._replace(ttft=first, e2e=end, tpot=np.where(served.end_s <= until, seen.tpot, np.nan))


def _ratio(serve: Serve, replica: Replica, share: Requests) -> float:
    return _worst(serve, share, simulate(replica, share))


def _worst(serve: Serve, requests: Requests, served: ServedRequests) -> float:
    return _worst_of(serve, [requests], [served])


def _worst_of(serve: Serve, shares: list[Requests], served: list[ServedRequests]) -> float:
    """The largest value of an objective over its bound."""
    kept = objectives_kept(serve, shares, served)
    return max((one.value_s / one.bound_s for one in kept), default=0.0)


def _verdict(serve: Serve, shares: list[Requests], served: list[ServedRequests]) -> Judged:
    """The verdict on what was served to the end."""
    kept = objectives_kept(serve, shares, served)
    ratio = max((one.value_s / one.bound_s for one in kept), default=0.0)
    why = "; ".join(missed(one) for one in kept if not one.met)
    return Judged(all(one.met for one in kept), ratio, why, serving_metrics(serve, shares, served))


def at_speed(serve: Serve, speed: float) -> Serve:
    """Return the workload whose requests come `speed` times as fast, as many of them; one whose rate is not in one word
    as it is."""
    if speed == 1.0 or not (serve.rate or serve.trace):
        return serve
    name = "rate" if serve.rate else "scale"
    faster = {name: getattr(serve, name) * speed, "window_s": serve.window_s / speed}
    return msgspec.structs.replace(serve, **faster)


def rate_of(requests: Requests) -> float:
    """Return the requests a second of the arrivals, as they would be if no answer took any time; infinite where all
    come at once."""
    span = float(requests.earliest_s()[-1])
    return (len(requests) - 1) / span if span > 0 else np.inf


def usd_hour(cluster: Cluster, devices: int) -> float | None:
    """Return US dollars an hour for so many devices of a cluster; None where no price is known."""
    price = cluster.total_price_usd_hour()
    return None if price is None else price * devices / cluster.num_devices


def missed(kept: Kept) -> str:
    """Return the objective that a simulation missed, in words."""
    return f"simulated: {kept.said} {latency(kept.value_s)} misses {latency(kept.bound_s)}"


class _Misses:
    """Requests over the bounds so far, and how many may be."""

    def __init__(self, serve: Serve, requests: Requests):
        judged = {"tpot_s": int((requests.output > 1).sum())}
        self.objectives = serve.common().objectives
        self.left = {n: most_misses(o.share, judged.get(n, len(requests))) for n, o in self.objectives.items()}

    def after(self, times: Times) -> str:
        """Return which objective is lost behind the times of another replica's requests; "" while none is."""
        for name, objective in self.objectives.items():
            self.left[name] -= int((getattr(times, name[:-2]) > objective.seconds).sum())
            if self.left[name] < 0:
                over = f"more than {1 - objective.share:.3g} of the requests are over {latency(objective.seconds)}"
                return f"simulated: {name[:-2].upper()}: {over}"
        return ""
