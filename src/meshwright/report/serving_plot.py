"""The drawings of a serving report: distributions of latencies, goodput against rate, the state over time."""

from __future__ import annotations

import numpy as np

from meshwright.answer.rates import RatePoint
from meshwright.answer.serving_answer import ServingPrediction
from meshwright.quantity import big, latency
from meshwright.report.figure import Drawing
from meshwright.report.line_plot import PlotLine, Scale, line_plot, spanned
from meshwright.report.serving_text import LATENCIES

#: Points of a curve: more cannot be told apart at its size.
MOST_POINTS = 300
#: Replicas whose state over time is drawn.
MOST_REPLICAS = 4
COLOURS = ("blue", "orange", "teal", "purple")


def instant(value: float) -> str:
    """A time on an axis: ``50 ms``, ``2 s``."""
    if not value:
        return "0"
    for least, scale, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us")):
        if value >= least:
            return f"{value * scale:.4g} {unit}"
    return latency(value)


def latencies(prediction: ServingPrediction) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the distribution of each latency: its values, sorted, and the share of requests (of gaps) within each."""
    table, gaps = (prediction.timeline.records.get(name) for name in ("requests", "gaps"))
    if not table:
        return {}
    more = table["output_tokens"] > 1
    answer = (table["end_s"] - table["first_s"])[more] / (table["output_tokens"][more] - 1)
    found = {
        "ttft_s": _sorted(table["first_s"] - table["arrival_s"]),
        "tpot_s": _sorted(answer),
        "e2e_s": _sorted(table["end_s"] - table["arrival_s"]),
    }
    if gaps is not None and len(gaps["count"]):
        found["itl_s"] = gaps["gap_s"], np.cumsum(gaps["count"]) / gaps["count"].sum()
    return {
        name: found[name] for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s") if name in found and len(found[name][0])
    }


def _sorted(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.sort(values), np.arange(1, len(values) + 1) / max(len(values), 1)


def distributions(prediction: ServingPrediction) -> list[Drawing]:
    """A cumulative distribution for each latency, with its bound."""
    bounds = {one.metric: one for one in prediction.objectives if not one.of}
    drawn = []
    for name, (values, shares) in latencies(prediction).items():
        kept = np.unique(np.linspace(0, len(values) - 1, MOST_POINTS).astype(np.int64))
        points = list(zip(values[kept].tolist(), shares[kept].tolist()))
        bound = bounds.get(name)
        ends = [max(v, 1e-6) for v in (values[0], values[-1], *((bound.bound_s,) if bound else ()))]
        x = spanned(ends, "", instant, logarithmic=True)
        y = Scale(low=0.0, high=1.0, title="", text=lambda v: f"{v:.0%}")
        along = [(bound.bound_s, instant(bound.bound_s))] if bound else []
        across = [(bound.share, f"{bound.share:.0%}")] if bound else []
        what = LATENCIES[name]
        said = f"Share of {'gaps' if name == 'itl_s' else 'requests'} within a {what}"
        line = PlotLine(name="", colour="blue", points=[(max(a, 1e-6), b) for a, b in points], stepped=True)
        drawn.append(line_plot(said, what, x, y, [line], across=across, along=along))
    return drawn


def rates(prediction: ServingPrediction, curve: tuple[RatePoint, ...]) -> list[Drawing]:
    """Requests answered, and within the bounds, against those that arrive; and the times at their percentiles."""
    if len(curve) < 2:
        return []
    closed = bool(curve[0].open)
    at = [float(p.open) if closed else p.offered for p in curve]
    x = spanned(at, "open requests" if closed else "requests a second that arrive", lambda v: f"{v:.4g}", closed)
    own = [a for a, p in zip(at, curve) if p.asked]
    along = [(a, "the question") for a in own]
    answered = PlotLine(
        name="answered",
        colour="blue",
        dots=True,
        points=[(a, p.metrics.throughput_req_per_s) for a, p in zip(at, curve)],
    )
    lines = [answered]
    if prediction.objectives:
        good = [(a, p.metrics.goodput_req_per_s) for a, p in zip(at, curve)]
        lines.append(PlotLine(name="within the bounds (goodput)", colour="green", dots=True, points=good))
    most = max(p.metrics.throughput_req_per_s for p in curve)
    y = spanned([most], "", lambda v: f"{v:.4g}")
    first = line_plot(
        "Requests answered a second against the rate", "requests/s", x, y, lines, along=along, named_above=True
    )
    shares = {one.metric: one for one in prediction.objectives if not one.of}
    times, across = [], []
    for name, colour in (("ttft_s", "orange"), ("tpot_s", "purple"), ("e2e_s", "teal")):
        if name == "e2e_s" and name not in shares:
            continue
        points = [(a, max(getattr(p.metrics, name).p90, 1e-6)) for a, p in zip(at, curve)]
        times.append(PlotLine(name=f"{name[:-2].upper()} p90", colour=colour, dots=True, points=points))
        if name in shares:
            across.append((shares[name].bound_s, f"{name[:-2].upper()} {instant(shares[name].bound_s)}"))
    values = [v for line in times for _, v in line.points] + [bound for bound, _ in across]
    second = line_plot(
        "Times of nine requests in ten against the rate",
        "latency",
        x,
        spanned(values, "", instant, logarithmic=True),
        times,
        across=across,
        along=along,
        named_above=True,
    )
    return [first, second]


def over_time(prediction: ServingPrediction) -> list[Drawing]:
    """Requests running and waiting, and the cache, of the first replicas."""
    found = [c for c in prediction.timeline.counters if c.rank < MOST_REPLICAS]
    if not found or not len(found[0].time_s):
        return []
    end = max(float(c.time_s[-1]) for c in found) or 1.0
    x = Scale(low=0.0, high=end, title="time", text=instant)
    several = len(prediction.timeline.ranks) > 1
    drawn = []
    for names, title in ((("running", "waiting"), "requests"), (("cache blocks",), "cache blocks in use")):
        lines = []
        for counter in found:
            if counter.name not in names:
                continue
            name = prediction.timeline.ranks[counter.rank].name if several else counter.name
            name = "" if several and counter.name == "waiting" else name  # dashed, as the title says
            place = counter.rank if several else names.index(counter.name)
            points = thinned(counter.time_s, counter.value)
            waiting = counter.name == "waiting"
            colour = COLOURS[place % len(COLOURS)]
            lines.append(PlotLine(name=name, colour=colour, points=points, stepped=True, dashed=several and waiting))
        high = [v for line in lines for _, v in line.points]
        cache = title.startswith("cache")
        across = (
            [(prediction.kv_blocks, f"all {prediction.kv_blocks:,}")]
            if cache and not several and max(high) > prediction.kv_blocks / 3
            else []
        )
        y = spanned([*high, *(v for v, _ in across), 1.0], "", big)
        shown = f"{title} (dashed: waiting)" if several and not cache else title
        drawn.append(line_plot(f"{title} of the replicas over time", shown, x, y, lines, across=across))
    return drawn


def thinned(time: np.ndarray, value: np.ndarray) -> list[tuple[float, float]]:
    """At most :data:`MOST_POINTS` points of a step function, of each of equal runs the first and the highest."""
    if len(time) <= MOST_POINTS:
        return list(zip(time.tolist(), value.tolist()))
    runs = np.array_split(np.arange(len(time)), MOST_POINTS // 2)
    kept = np.unique([i for run in runs for i in (run[0], run[np.argmax(value[run])])])
    return list(zip(time[kept].tolist(), value[kept].tolist()))
