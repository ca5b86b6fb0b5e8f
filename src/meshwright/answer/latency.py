"""Latencies of requests: from their records to means, percentiles, goodput and intervals."""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.answer.serving_answer import Kept, ServingMetrics, Summary
from meshwright.causes import ERROR_CLASS, PRICED
from meshwright.cost.engine import EngineProfile
from meshwright.simulate.serve import simulate
from meshwright.simulate.served import GAP_EDGES, Replica, ServedRequests
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Objective, Serve

#: Draws of the errors behind the intervals, and the requests of each: the first of the workload's.
NUM_DRAWS, DRAWN_REQUESTS = 16, 4000
#: The same of a policy that no compiled loop knows.
DRAWN_PLAINLY = 300
#: Runs of iterations of each draw there, as far as they are not those of the least requests.
DRAWN_RUNS, LEAST_DRAWN = 800, 30


class Times(NamedTuple):
    """Times of requests [n] in seconds: ``tpot`` is NaN of answers of one token."""

    ttft: np.ndarray
    tpot: np.ndarray
    e2e: np.ndarray
    queue: np.ndarray


def times_of(requests: Requests, served: ServedRequests) -> Times:
    """Return the latencies of requests that one replica served."""
    more = requests.output - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(more > 0, (served.end_s - served.first_s) / more, np.nan)
    return Times(
        served.first_s - served.arrival_s,
        tpot,
        served.end_s - served.arrival_s,
        served.scheduled_s - served.arrival_s,
    )


def times_of_all(shares: list[Requests], served: list[ServedRequests]) -> Times:
    """Return the latencies of the requests of all replicas."""
    found = [times_of(requests, one) for requests, one in zip(shares, served)]
    return Times(*(np.concatenate(columns) for columns in zip(*found)))


def summary(values: np.ndarray) -> Summary:
    """Return the mean and the percentiles of times, of those that are no NaN."""
    values = values[~np.isnan(values)]
    if not len(values):
        return Summary(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99]).tolist()
    return Summary(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def query_summary(shares: list[Requests], served: list[ServedRequests]) -> Summary | None:
    """Return the times from when a query of several samples comes to the last of its answers; None where there is
    none. Turns of a conversation are no query: they come one after the other."""
    if not all(len(share.program) and not len(share.after) for share in shares):
        return None
    program = np.concatenate([share.program for share in shares])
    came, ended = (np.concatenate([getattr(one, name) for one in served]) for name in ("arrival_s", "end_s"))
    queries, of = np.unique(program[program >= 0], return_inverse=True)
    first, last = np.full(len(queries), np.inf), np.zeros(len(queries))
    np.minimum.at(first, of, came[program >= 0])
    np.maximum.at(last, of, ended[program >= 0])
    return summary(last - first) if len(queries) else None


def _gap_summary(gaps: np.ndarray) -> Summary:
    """Return the mean and the percentiles of a histogram of gaps; a bin's gap is the middle of its edges."""
    total = int(gaps.sum())
    if not total:
        return Summary(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    middle = GAP_EDGES * 1.01
    after = np.cumsum(gaps)
    p50, p90, p99 = (float(middle[np.searchsorted(after, q * total)]) for q in (0.5, 0.9, 0.99))
    return Summary(mean=float(gaps @ middle / total), p50=p50, p90=p90, p99=p99)


def _span(shares: list[Requests], served: list[ServedRequests]) -> float:
    """Seconds from the first arrival to the last token."""
    return max(one.end_s.max() for one in served) - min(one.arrival_s.min() for one in served)


def serving_metrics(serve: Serve, shares: list[Requests], served: list[ServedRequests]) -> ServingMetrics:
    """Return the metrics of what the replicas served, without intervals."""
    times, span = times_of_all(shares, served), float(_span(shares, served))
    good = kept_objectives(serve, shares, times)
    tokens = sum(int(share.output.sum()) for share in shares)
    return ServingMetrics(
        ttft_s=summary(times.ttft),
        tpot_s=summary(times.tpot),
        itl_s=_gap_summary(sum(one.gaps for one in served)),
        e2e_s=summary(times.e2e),
        queue_s=summary(times.queue),
        throughput_tokens_per_s=tokens / span,
        throughput_interval=None,
        throughput_req_per_s=len(good) / span,
        goodput_req_per_s=float(good.sum()) / span,
        attainment=float(good.mean()),
    )


def kept_objectives(serve: Serve, shares: list[Requests], times: Times) -> np.ndarray:
    """Return whether each request [n] kept every objective that it is held to."""
    good = np.ones(len(times.ttft), bool)
    for name, bound, _, judged in _judged(serve, shares):
        values = getattr(times, name[:-2])
        good &= ~(judged & (values > bound.seconds))  # an answer of one token has no time per output token to keep
    return good


def objectives_kept(serve: Serve, shares: list[Requests], served: list[ServedRequests]) -> list[Kept]:
    """Return every objective with the value at its percentile, of the requests that it is of."""
    times = times_of_all(shares, served)
    found = []
    for name, bound, whose, judged in _judged(serve, shares):
        values = getattr(times, name[:-2])[judged]
        values = values[~np.isnan(values)]
        at = float(np.quantile(values, bound.share)) if len(values) else 0.0
        found.append(Kept(name, bound.seconds, bound.share, at, whose))
    return found


def _judged(serve: Serve, shares: list[Requests]) -> list[tuple[str, Objective, str, np.ndarray]]:
    """Return (metric, bound, whose, which requests it is of) of every objective that any request has: those of the
    workload, of everybody who has none of their own, then those of priorities and clients."""
    slo = np.concatenate([s.slo if len(s.slo) else np.zeros(len(s), np.int64) for s in shares])
    classes, names, found = serve.objective_classes, serve.class_names, []
    for metric in dict.fromkeys(name for one in classes for name in one):
        general = serve.objectives.get(metric)
        alike = [i for i, one in enumerate(classes) if one.get(metric) == general]
        groups = [("", general, np.isin(slo, alike))] if general else []
        own = [i for i, one in enumerate(classes) if metric in one and i not in alike]
        groups += [(names[i], classes[i][metric], slo == i) for i in own]
        found += [(metric, bound, whose, judged) for whose, bound, judged in groups if judged.any()]
    return found


def with_intervals(
    metrics: ServingMetrics, serve: Serve, replica: Replica, shares: list[Requests], profile: EngineProfile
) -> ServingMetrics:
    """The metrics with 80% intervals: the first requests served again under draws of the errors of the costs, one
    factor for each class of errors and one for the engine, log-normal and stratified as those of a step are."""
    compiled = replica.compiled and not len(shares[0].after)
    first = shares[0].first(DRAWN_REQUESTS if compiled else DRAWN_PLAINLY)
    served = simulate(replica, first)
    if not compiled and served.runs > DRAWN_RUNS:
        first = first.first(max(LEAST_DRAWN, len(first) * DRAWN_RUNS // served.runs))
        served = simulate(replica, first)
    base = serving_metrics(serve, [first], [served])
    return spread_over(
        metrics, base, [serving_metrics(serve, [first], [simulate(r, first)]) for r in drawn(replica, profile)]
    )


def spread_over(metrics: ServingMetrics, base: ServingMetrics, found: list[ServingMetrics]) -> ServingMetrics:
    """Return metrics with intervals as wide, relative to the means, as those `found` under draws are around `base`."""

    def interval(mean: float, name: str) -> tuple[float, float]:
        usual = _value(base, name)
        low, high = np.quantile([_value(one, name) for one in found], [0.1, 0.9]).tolist()
        if not usual:
            return (mean, mean)
        return min(mean, mean * low / usual), max(mean, mean * high / usual)

    said = {}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"):
        found_s = getattr(metrics, name)
        said[name] = msgspec.structs.replace(found_s, mean_interval=interval(found_s.mean, name))
    return msgspec.structs.replace(
        metrics,
        **said,
        throughput_interval=interval(metrics.throughput_tokens_per_s, "throughput_tokens_per_s"),
    )


def _value(metrics: ServingMetrics, name: str) -> float:
    found = getattr(metrics, name)
    return found.mean if isinstance(found, Summary) else found


def drawn(replica: Replica, profile: EngineProfile) -> list[Replica]:
    """Return the replica under draws of the errors, the same for the same costs and profile."""
    table, rng = replica.costs, np.random.default_rng(0)
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / NUM_DRAWS) for i in range(NUM_DRAWS)])
    seconds, spread = table.linear_parts.sum(axis=0), table.linear_spread.sum(axis=0)
    factors = {}
    for name in sorted(set(ERROR_CLASS.values())):
        mine = [i for i, cause in enumerate(PRICED) if ERROR_CLASS[cause] == name]
        total = float(seconds[mine].sum())
        sigma = table.sigma if name == "attention" else float(spread[mine].sum()) / total if total else 0.0
        factors[name] = np.exp(rng.permutation(normal) * sigma)
    engine = np.exp(rng.permutation(normal) * np.hypot(profile.sigma, profile.pace_sigma))
    front = np.exp(rng.permutation(normal) * profile.front_sigma) if profile.server is not None else None
    host = replica.host
    out = []
    for draw in range(NUM_DRAWS):
        by_cause = np.array([factors[ERROR_CLASS[cause]][draw] for cause in PRICED]) * engine[draw]
        scaled = table.scaled(by_cause, float(factors["attention"][draw] * engine[draw]))
        slower = {f: getattr(host, f) * float(engine[draw]) for f in ("step_s", "request_s", "eager_s")}
        if front is not None:  # of a measured server, what clients wait for besides
            slower |= {f: getattr(host, f) * float(front[draw]) for f in ("front_s", "token_s")}
        out.append(msgspec.structs.replace(replica, costs=scaled, host=msgspec.structs.replace(host, **slower)))
    return out
