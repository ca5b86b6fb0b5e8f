"""Goodput against rate: the requests of a serving question again at other rates, until the replicas cannot follow.

Each point serves the first requests of the question, with the gaps between their arrivals shortened or lengthened (of a
closed loop, with more or fewer open requests), on the same simulator.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from meshwright import serving
from meshwright.answer.serving import predict_serving
from meshwright.answer.serving_answer import ServingMetrics, ServingPrediction
from meshwright.simulate.iterations import IterationCosts
from meshwright.spec.requests import Requests

#: Rates of the points over the question's own.
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
#: Requests of a point: of what the compiled loop knows, of other words of an engine, of a policy of its own.
COMPILED, PLAIN, SLOW = 4000, 400, 100
#: Words of an engine that the compiled loop knows.
KNOWN = ("policy", "profile", "max_batch", "budget", "block", "kv_blocks", "kv", "memory", "routing", "graphs")
#: A point that answers less than this share of what arrives is the last.
FOLLOWS = 0.75


class RatePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A rate and its ``metrics``: ``offered`` requests a second, of a closed loop as many as come, ``open`` requests at
    a time (0: not a closed loop). ``asked``: the question's own."""

    offered: float
    open: int
    metrics: ServingMetrics
    asked: bool


def rate_curve(prediction: ServingPrediction, requests: Requests) -> tuple[RatePoint, ...]:
    """Return the points of a served question, in order of their rates; none of a static batch or where nothing is
    served. `requests` are the question's."""
    serve = prediction.serve
    if prediction.metrics is None or (_span(requests) <= 0 and not requests.concurrency):
        return ()
    first = requests.first(_most(prediction))
    tables: dict[Hashable, IterationCosts] = {}
    found, before = [], 0
    for factor in FACTORS:
        changed, loops = _at(first, factor)
        if loops and loops == before:
            continue
        before = loops
        point = predict_serving(
            prediction.model,
            prediction.cluster,
            serve,
            prediction.plan,
            requests=changed,
            detail=False,
            tables=tables,
        )
        if point.metrics is None:
            break
        offered = point.metrics.throughput_req_per_s if loops else len(first) / _span(changed)
        found.append(RatePoint(offered=offered, open=loops, metrics=point.metrics, asked=factor == 1.0))
        if factor >= 1.0 and _saturated(found, waiting=bool((first.after >= 0).any())):
            break
    return tuple(found)


def _most(prediction: ServingPrediction) -> int:
    """Requests of a point, so that all of them take a few seconds."""
    words, usual = prediction.serve.engine, type(prediction.serve.engine)()
    if not serving.get("batching", words.policy).code:
        return SLOW
    if prediction.plan.several:
        return PLAIN
    looks = prediction.plan.layout.dp > 1 and serving.get("routing", words.routing).looks
    others = [f for f in words.__struct_fields__ if f not in KNOWN and getattr(words, f) != getattr(usual, f)]
    return PLAIN if looks or others else COMPILED


def _at(requests: Requests, factor: float) -> tuple[Requests, int]:
    """The requests at so many times their rate, and how many are open at a time."""
    if not requests.concurrency:
        return requests.faster(factor), 0
    loops = max(1, round(requests.concurrency * factor))
    return msgspec.structs.replace(requests, concurrency=loops, arrival_s=0.0 * requests.arrival_s), loops


def _span(requests: Requests) -> float:
    """Seconds in which requests come; those that wait for an earlier one as if that took no time."""
    at = requests.earliest_s()
    return float(at.max() - at.min()) if len(at) else 0.0


def _saturated(found: list[RatePoint], waiting: bool) -> bool:
    """Whether more would not be answered: of what arrives too little is. Where requests wait for others (`waiting`, or
    a closed loop) they never come faster than answers: then more bring no more, or few keep the bounds."""
    last = found[-1]
    if last.open or waiting:
        before = found[-2].metrics.throughput_req_per_s if len(found) > 1 else 0.0
        return last.metrics.throughput_req_per_s < 1.05 * before or last.metrics.attainment < 0.5
    return last.metrics.throughput_req_per_s < FOLLOWS * last.offered
