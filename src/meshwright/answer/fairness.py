"""Fairness between tenants, and the latencies of groups of requests: of a tenant, a priority, a class of objectives.

The service of a tenant is its tokens of prompts that began to be computed, and twice those generated for it (the
virtual token counter's weights: Sheng et al., OSDI 2024, 2401.00588, section 5.1). Fairness is judged where it is at
stake: while at least two tenants wait.
"""

from __future__ import annotations

import numpy as np

from meshwright.answer.latency import Times, kept_objectives, summary, times_of_all
from meshwright.answer.serving_answer import Fairness, GroupMetrics
from meshwright.serving.vtc import GENERATED, PROMPT
from meshwright.simulate.served import ServedRequests
from meshwright.spec.requests import Requests
from meshwright.spec.serve import Serve

#: Windows of time in which waiting and service are counted, and tenants that are compared: those with most requests.
WINDOWS, MOST_COMPARED = 512, 32
#: Groups of one kind that are listed: those with most requests.
MOST_LISTED = 64


def group_metrics(serve: Serve, shares: list[Requests], served: list[ServedRequests]) -> tuple[GroupMetrics, ...]:
    """Return the metrics of every tenant, priority and class of objectives, where there is more than one of a kind."""
    times, good = times_of_all(shares, served), kept_objectives(serve, shares, times_of_all(shares, served))
    names = {"tenant": serve.tenants.names if serve.tenants else (), "slo": tuple(serve.class_names), "priority": ()}
    found = []
    for kind, words in (("tenant", "tenant"), ("priority", "priority"), ("slo", "objectives of")):
        column = _column(shares, kind)
        values, counts = np.unique(column, return_counts=True)
        if len(values) < 2:
            continue
        for value in sorted(values[np.argsort(-counts, kind="stable")][:MOST_LISTED].tolist()):
            named = names[kind][value] if 0 <= value < len(names[kind]) else ""
            name = f"{words} {named or ('the workload' if kind == 'slo' else value)}"
            found.append(_group(kind, name, column == value, times, good))
    return tuple(found)


def _column(shares: list[Requests], kind: str) -> np.ndarray:
    """A column of all requests, 0 where nobody said anything."""
    return np.concatenate([c if len(c := getattr(s, kind)) else np.zeros(len(s), np.int64) for s in shares])


def _group(kind: str, name: str, mine: np.ndarray, times: Times, good: np.ndarray) -> GroupMetrics:
    return GroupMetrics(
        kind=kind,
        name=name,
        requests=int(mine.sum()),
        ttft_s=summary(times.ttft[mine]),
        tpot_s=summary(times.tpot[mine]),
        e2e_s=summary(times.e2e[mine]),
        attainment=float(good[mine].mean()),
    )


def fairness(shares: list[Requests], served: list[ServedRequests]) -> Fairness | None:
    """Return how fairly tenants that waited at the same time were served; None where no two ever did."""
    tenant = _column(shares, "tenant")
    values, counts = np.unique(tenant, return_counts=True)
    compared = values[np.argsort(-counts, kind="stable")][:MOST_COMPARED]
    if len(compared) < 2:
        return None
    edges = _edges(served)
    waits = np.empty((len(compared), WINDOWS), bool)
    gained = np.empty((len(compared), WINDOWS))
    for row, one in enumerate(compared):
        which = [np.flatnonzero(_column([share], "tenant") == one) for share in shares]
        mine = [(s.chosen(w), r.chosen(w)) for s, r, w in zip(shares, served, which) if len(w)]
        waits[row] = sum(_waiting(r, edges) for _, r in mine) > 0
        gained[row] = sum(_service(s, r, edges) for s, r in mine)
    at_stake = waits & (waits.sum(axis=0) > 1)
    if not at_stake.any():
        return None
    share = np.array([g[a].sum() / a.sum() for g, a in zip(gained, at_stake) if a.any()])
    return Fairness(
        service_gap_tokens=_widest(gained, waits),
        jain_index=float(share.sum() ** 2 / (len(share) * (share**2).sum())) if share.any() else 1.0,
        contended=float(at_stake.any(axis=0).mean()),
    )


def _edges(served: list[ServedRequests]) -> np.ndarray:
    return np.linspace(min(s.arrival_s.min() for s in served), max(s.end_s.max() for s in served), WINDOWS + 1)


def _waiting(served: ServedRequests, edges: np.ndarray) -> np.ndarray:
    """How many requests wait through the whole of each window."""
    came = np.searchsorted(np.sort(served.arrival_s), edges[:-1], side="right")
    return came - np.searchsorted(np.sort(served.scheduled_s), edges[1:], side="left")


def _service(requests: Requests, served: ServedRequests, edges: np.ndarray) -> np.ndarray:
    """The service in each window: prompts when they begin to be computed, answers evenly from first to last token."""
    prompts = PROMPT * np.histogram(served.scheduled_s, edges, weights=requests.prompt.astype(float))[0]
    first = GENERATED * np.histogram(served.first_s, edges)[0]
    longer = requests.output > 1
    begin, end, more = served.first_s[longer], served.end_s[longer], requests.output[longer] - 1.0
    pace = more / np.maximum(end - begin, 1e-12)
    # what was generated until t: the sum of pace x (t - begin) of those begun, less pace x (t - end) of those ended
    done = _ramps(begin, pace, edges) - _ramps(end, pace, edges)
    return prompts + first + GENERATED * np.diff(done)


def _ramps(at: np.ndarray, pace: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The sum over ramps of pace x (t - at) at every edge t behind `at`."""
    order = np.argsort(at)
    slopes = np.concatenate([[0.0], np.cumsum(pace[order])])
    offsets = np.concatenate([[0.0], np.cumsum((pace * at)[order])])
    count = np.searchsorted(at[order], edges, side="right")
    return slopes[count] * edges - offsets[count]


def _widest(gained: np.ndarray, waits: np.ndarray) -> float:
    """The largest difference of service that two tenants had in any time through which both waited."""
    one, other = np.triu_indices(len(gained), 1)
    ahead, low, high = np.zeros(len(one)), np.zeros(len(one)), np.zeros(len(one))
    widest = 0.0
    for window in range(gained.shape[1]):
        both = waits[one, window] & waits[other, window]
        ahead = np.where(both, ahead + gained[one, window] - gained[other, window], 0.0)
        low, high = np.where(both, np.minimum(low, ahead), 0.0), np.where(both, np.maximum(high, ahead), 0.0)
        widest = max(widest, float((high - low).max()))
    return widest
