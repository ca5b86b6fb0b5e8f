"""A serving prediction as one offline HTML file: verdict, latencies, goodput against rate, time, memory, and what it
rests on. Every drawing has a table that says the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.answer.rates import RatePoint
from meshwright.answer.serving_answer import ServingPrediction
from meshwright.atomic import write_bytes
from meshwright.causes import BY_NAME
from meshwright.quantity import big, latency, seconds
from meshwright.report import charts, document, palette, serving_plot
from meshwright.report.palette import cause_colour
from meshwright.report.serving_text import (
    BESIDE_HEADS,
    GROUP_HEADS,
    LATENCIES,
    POOL_HEADS,
    beside_rows,
    causes,
    fairness,
    group_rows,
    handed,
    pool_rows,
    power_rows,
    served,
    used,
    verdict,
    without_jobs,
)

STYLES = ("base.css", "charts.css", "serving.css")


def write(
    prediction: ServingPrediction, path: str | Path, curve: tuple[RatePoint, ...] = (), question: Mapping[str, str] = {}
) -> None:
    """Write the report of `prediction` to `path`, whole or not at all; `curve` is its goodput against rate and
    `question` the words that ask for it.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(prediction, curve, question).encode("utf-8"))


def render(prediction: ServingPrediction, curve: tuple[RatePoint, ...] = (), question: Mapping[str, str] = {}) -> str:
    """The report as one HTML document."""
    p = prediction
    return document.render(
        "serving.html.j2",
        p=p,
        styles=[document.static(name) for name in STYLES],
        scripts=[document.static("theme.js")],
        light=palette.css("light"),
        dark=palette.css("dark"),
        verdict=verdict(p),
        tiles=_tiles(p),
        headline=_headline(p),
        objectives=[_objective(one) for one in p.objectives],
        latencies=_latencies(p),
        distributions=[figure.svg() for figure in serving_plot.distributions(p)],
        rates=[figure.svg() for figure in serving_plot.rates(p, curve)],
        points=_points(curve),
        closed=bool(curve and curve[0].open),
        over_time=[figure.svg() for figure in serving_plot.over_time(p)],
        replicas=len(p.timeline.ranks),
        drawn=serving_plot.MOST_REPLICAS,
        state=_state(p),
        groups=group_rows(p),
        group_heads=GROUP_HEADS,
        fairness=fairness(p),
        pools=pool_rows(p) if p.transfers is not None else [],
        pool_heads=POOL_HEADS,
        handed=handed(p),
        stages=[(name, latency(value)) for name, value in p.transfers.stages_s.items()] if p.transfers else [],
        beside=beside_rows(p),
        beside_heads=BESIDE_HEADS,
        without=without_jobs(p),
        power=power_rows(p),
        causes=_causes(p),
        used=used(p),
        memory=charts.memory(p),
        command=_command(question),
    )


def _tiles(p: ServingPrediction) -> list[tuple[str, str, str]]:
    """(what, value, note) of the first look."""
    if p.metrics is None:
        return []
    m, tiles = p.metrics, []
    everybodys = [one for one in p.objectives if not one.of]
    shares = {one.metric: one.share for one in everybodys}
    at = {one.metric: one.value_s for one in everybodys}
    for name in ("ttft_s", "tpot_s"):
        summary = getattr(m, name)
        share, value = shares.get(name, 0.9), at.get(name, summary.p90)
        tiles.append((f"{name[:-2].upper()} p{share * 100:g}", latency(value), f"{latency(summary.mean)} on average"))
    note = f"{m.throughput_req_per_s:.3g} requests/s"
    if m.throughput_interval:
        note += ", 80% between {:,.0f} and {:,.0f}".format(*m.throughput_interval)
    tiles.append(("Throughput", f"{m.throughput_tokens_per_s:,.0f} tokens/s", note))
    if p.objectives:
        tiles.append(("Goodput", f"{m.goodput_req_per_s:.3g} requests/s", f"{m.attainment:.1%} keep every bound"))
    rows = {what: value for what, value, _ in used(p)}
    if rows:
        tiles.append(
            ("Per million tokens", rows["cost"], f"{rows['energy']}, devices compute {rows['devices compute']}")
        )
    return tiles


def _headline(p: ServingPrediction) -> list[tuple[str, str, bool]]:
    """(what, value, whether it is a word of the question) of the question."""
    return [
        ("model", f"{p.model.name}, {big(p.model.num_params)} parameters", False),
        ("cluster", p.cluster.name, False),
        ("served", served(p), False),
        ("plan", p.plan.text(), True),
        ("requests", p.serve.text(), True),
    ]


def _objective(one) -> tuple[str, str, str, str, bool]:
    """The row of a bound: latency, bound, the share that has to keep it, the value there, whether it is kept."""
    what = LATENCIES[one.metric] + (f" of {one.of}" if one.of else "")
    return what, latency(one.bound_s), f"{one.share:.1%}", latency(one.value_s), one.met


def _latencies(p: ServingPrediction) -> list[tuple[str, ...]]:
    if p.metrics is None:
        return []
    rows = []
    for name, words in LATENCIES.items():
        summary = getattr(p.metrics, name)
        low, high = summary.mean_interval or (summary.mean, summary.mean)
        mean = f"{latency(summary.mean)}", f"{latency(low)} to {latency(high)}"
        rows.append((words, *mean, latency(summary.p50), latency(summary.p90), latency(summary.p99)))
    return rows


def _points(curve: tuple[RatePoint, ...]) -> list[tuple[Any, ...]]:
    """The rows of the table beside goodput against rate."""
    return [
        (
            f"{p.open:,}" if p.open else f"{p.offered:.3g}",
            f"{p.metrics.throughput_req_per_s:.3g}",
            f"{p.metrics.goodput_req_per_s:.3g}",
            f"{p.metrics.attainment:.1%}",
            latency(p.metrics.ttft_s.p90),
            latency(p.metrics.tpot_s.p90),
            p.asked,
        )
        for p in curve
    ]


def _state(p: ServingPrediction) -> list[tuple[str, str]]:
    """(what, value) of the engine's state over the run."""
    if p.metrics is None:
        return []
    rows = [
        ("largest batch", f"{p.peak_batch:,} requests"),
        ("most cache in use", f"{p.peak_kv_blocks:,} of {p.kv_blocks:,} blocks of a replica"),
        ("iterations", f"{p.iterations:,}"),
        ("preemptions", f"{p.preemptions:,}" + (f", {p.swaps:,} to the host's memory" if p.swaps else "")),
        ("waiting for the first iteration", f"{latency(p.metrics.queue_s.mean)} on average"),
    ]
    if p.serve.engine.prefix_cache or p.hit_rate:
        rows.append(("prompt tokens found in the cache", f"{p.hit_rate:.1%}"))
    return rows


def _causes(p: ServingPrediction) -> list[dict[str, Any]]:
    rows = causes(p)
    most = max((share for _, _, _, share in rows), default=1.0) or 1.0
    return [
        {
            "what": what,
            "time": seconds(spent),
            "share": f"{share:.1%}",
            "width": 100 * share / most,
            "colour": cause_colour(name) if name in BY_NAME else "grey",
            "idle": name == "idle",
        }
        for name, what, spent, share in rows
    ]


def _command(question: Mapping[str, str]) -> str:
    """The command that gives this answer again, for a shell; "" where nobody said the question."""
    import shlex

    words = [f"--{name} {shlex.quote(value)}" for name, value in question.items() if value and name != "model"]
    return " ".join(["meshwright predict", shlex.quote(question["model"]), *words]) if question else ""
