"""Comparison of served requests, predicted and measured: percentiles, distributions, batch and queue over time.

Both sides are timelines with a record of every request, whoever wrote them: the serving simulator, or a client of a
server. States over time are those that a client sees on both sides: a request waits until its first token is there, and
is answered until its last one is.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from meshwright.answer.serving_answer import Summary
from meshwright.timeline import Identity, Timeline
from meshwright.traffic.timeline import open_over_time

FORMAT_VERSION = 1
#: Shares of requests at which the distributions are laid side by side, and windows of time.
SHARES = tuple(round(0.05 * place, 2) for place in range(1, 20))
WINDOWS = 20
#: A prediction is near within so much of a mean and of a 90th percentile; states part from so many requests on.
NEAR, NEAR_P90, APART = 0.15, 0.25, 1.0
#: The times of a request, as they are named everywhere.
TIMES = ("ttft_s", "tpot_s", "e2e_s", "itl_s")


class TimePair(msgspec.Struct, frozen=True, kw_only=True):
    """A time of requests on both sides: mean and percentiles in seconds, and the seconds within which each share of
    :data:`SHARES` is (``cdf``); of gaps between tokens there is no distribution of requests."""

    name: str
    predicted: Summary
    measured: Summary
    predicted_cdf: tuple[float, ...]
    measured_cdf: tuple[float, ...]

    def error(self, part: str = "mean") -> float | None:
        """Return predicted over measured, less one; None where nothing was measured."""
        measured = getattr(self.measured, part)
        return getattr(self.predicted, part) / measured - 1 if measured else None


class StateWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A window of time: mean requests that were answered and that waited for their first token, on both sides."""

    begin_s: float
    predicted_batch: float
    measured_batch: float
    predicted_queue: float
    measured_queue: float


class GroupError(msgspec.Struct, frozen=True, kw_only=True):
    """Some requests, by what they have in common, and how far their mean times to the first token and per token are
    apart (predicted over measured, less one; None where there is none)."""

    name: str
    requests: int
    ttft: float | None
    tpot: float | None


class ServedComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Served requests, predicted against measured. ``parts_s`` is the begin of the first window from which on the
    requests that are answered or wait are further apart than one and a quarter of those measured, None where they never
    are; ``groups`` are requests by length and by time of arrival. ``differ`` are words of the identity that are not the
    same on both sides."""

    format_version: int
    requests: tuple[int, int]
    times: tuple[TimePair, ...]
    throughput_req_per_s: tuple[float, float]
    windows: tuple[StateWindow, ...]
    groups: tuple[GroupError, ...]
    parts_s: float | None
    differ: dict[str, tuple[str, str]]

    @property
    def near(self) -> bool:
        """Whether times to the first token and per token are near, in the mean and at the 90th percentile."""
        found = [(t.error(), t.error("p90")) for t in self.times if t.name in ("ttft_s", "tpot_s")]
        return all((mean is None or abs(mean) <= NEAR) and (p90 is None or abs(p90) <= NEAR_P90) for mean, p90 in found)

    def to_json(self) -> dict[str, Any]:
        """Plain values, times in seconds."""
        errors = {t.name: {p: t.error(p) for p in ("mean", "p50", "p90", "p99")} for t in self.times}
        return msgspec.to_builtins(self) | {"near": self.near, "errors": errors, "shares": list(SHARES)}


def is_served(timeline: Timeline) -> bool:
    """Whether a timeline is of requests that were served."""
    return bool(len(timeline.records.get("requests", {}).get("first_s", ())))


def compare_served(predicted: Timeline, measured: Timeline) -> ServedComparison:
    """Lay the requests of two timelines side by side."""
    ours, theirs = _columns(predicted), _columns(measured)
    windows = _windows(ours, theirs)
    return ServedComparison(
        format_version=FORMAT_VERSION,
        requests=(len(ours["ttft_s"]), len(theirs["ttft_s"])),
        times=tuple(_time(name, predicted, measured, ours, theirs) for name in TIMES),
        throughput_req_per_s=(_rate(ours), _rate(theirs)),
        windows=windows,
        groups=_groups(ours, theirs),
        parts_s=_parting(windows),
        differ=_differ(predicted.identity, measured.identity),
    )


def _columns(timeline: Timeline) -> dict[str, np.ndarray]:
    """The columns of answered requests in order of arrival, whose first one is at 0."""
    table = timeline.records["requests"]
    kept = np.flatnonzero((table["first_s"] >= 0) & (table["end_s"] >= table["first_s"]))
    found = {name: np.asarray(column)[kept] for name, column in table.items()}
    arrival, output = found["arrival_s"].astype(float), found["output_tokens"].astype(float)
    zero = arrival.min()
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output > 1, (found["end_s"] - found["first_s"]) / (output - 1), np.nan)
    return {
        "arrival_s": arrival - zero,
        "first_s": found["first_s"] - zero,
        "end_s": found["end_s"] - zero,
        "prompt": found["prompt_tokens"].astype(float),
        "output": output,
        "ttft_s": found["first_s"] - arrival,
        "tpot_s": tpot,
        "e2e_s": found["end_s"] - arrival,
    }


def _time(
    name: str, predicted: Timeline, measured: Timeline, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]
) -> TimePair:
    from meshwright.answer.latency import summary

    if name == "itl_s":
        said = {"predicted": _of_gaps(predicted), "measured": _of_gaps(measured)}
        return TimePair(name=name, **said, predicted_cdf=(), measured_cdf=())
    a, b = (side[name][~np.isnan(side[name])] for side in (ours, theirs))
    cdfs = [tuple(np.quantile(one, SHARES).tolist()) if len(one) else () for one in (a, b)]
    return TimePair(name=name, predicted=summary(a), measured=summary(b), predicted_cdf=cdfs[0], measured_cdf=cdfs[1])


def _of_gaps(timeline: Timeline) -> Summary:
    """The mean and percentiles of gaps between tokens, of their histogram."""
    table = timeline.records.get("gaps", {})
    gap, count = np.asarray(table.get("gap_s", ()), float), np.asarray(table.get("count", ()), float)
    if not count.sum():
        return Summary(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    order = np.argsort(gap)
    gap, after = gap[order], np.cumsum(count[order])
    p50, p90, p99 = (float(gap[min(np.searchsorted(after, q * after[-1]), len(gap) - 1)]) for q in (0.5, 0.9, 0.99))
    return Summary(mean=float(gap @ count[order] / after[-1]), p50=p50, p90=p90, p99=p99)


def _rate(side: dict[str, np.ndarray]) -> float:
    span = float(side["end_s"].max())
    return len(side["end_s"]) / span if span else 0.0


def _windows(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[StateWindow, ...]:
    """Mean states in windows of equal length over what either side took."""
    span = max(float(side["end_s"].max()) for side in (ours, theirs))
    edges = np.linspace(0.0, span, WINDOWS + 1)
    a, b = (_means(side, edges) for side in (ours, theirs))
    return tuple(
        StateWindow(
            begin_s=float(edges[i]),
            predicted_batch=float(a[i, 0]),
            measured_batch=float(b[i, 0]),
            predicted_queue=float(a[i, 1]),
            measured_queue=float(b[i, 1]),
        )
        for i in range(WINDOWS)
    )


def _means(side: dict[str, np.ndarray], edges: np.ndarray) -> np.ndarray:
    """Mean requests answered and waiting in each window [windows, 2]."""
    at, states = open_over_time(side["arrival_s"], side["first_s"], side["end_s"])
    width = np.maximum(np.diff(edges), 1e-12)
    passed = np.concatenate([[[0.0, 0.0]], np.cumsum(states[:-1, :2] * np.diff(at)[:, None], axis=0)])
    place = np.clip(np.searchsorted(at, edges, side="right") - 1, 0, None)
    until = passed[place] + states[place, :2] * np.maximum(edges - at[place], 0.0)[:, None]
    return np.diff(until, axis=0) / width[:, None]


def _parting(windows: tuple[StateWindow, ...]) -> float | None:
    for one in windows:
        for predicted, measured in (
            (one.predicted_batch, one.measured_batch),
            (one.predicted_queue, one.measured_queue),
        ):
            if abs(predicted - measured) > APART + 0.25 * measured:
                return one.begin_s
    return None


def _groups(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[GroupError, ...]:
    """Requests by the third of prompts, of answers and of the time in which they came, as measured."""
    found = []
    for name, column in (("prompt", "prompt"), ("answer", "output"), ("arrival", "arrival_s")):
        low, high = np.quantile(theirs[column], [1 / 3, 2 / 3]).tolist()
        for words, least, most in _thirds(name, low, high):
            a, b = ((side[column] > least) & (side[column] <= most) for side in (ours, theirs))
            if a.any() and b.any():
                ttft, tpot = (_error(ours[t][a], theirs[t][b]) for t in ("ttft_s", "tpot_s"))
                found.append(GroupError(name=words, requests=int(b.sum()), ttft=ttft, tpot=tpot))
    return tuple(found)


def _thirds(name: str, low: float, high: float) -> list[tuple[str, float, float]]:
    unit = "s" if name == "arrival" else "tokens"
    if low == high:
        return [(f"{name}s of up to {low:g} {unit}", -1.0, low), (f"{name}s of more", low, np.inf)]
    return [
        (f"{name} up to {low:.4g} {unit}", -1.0, low),
        (f"{name} up to {high:.4g} {unit}", low, high),
        (f"{name} beyond", high, np.inf),
    ]


def _error(predicted: np.ndarray, measured: np.ndarray) -> float | None:
    p, m = predicted[~np.isnan(predicted)], measured[~np.isnan(measured)]
    return float(p.mean() / m.mean() - 1) if len(p) and len(m) and m.mean() else None


def _differ(predicted: Identity, measured: Identity) -> dict[str, tuple[str, str]]:
    pairs = {name: (getattr(predicted, name), getattr(measured, name)) for name in ("model", "workload")}
    return {name: pair for name, pair in pairs.items() if all(pair) and pair[0] != pair[1]}
