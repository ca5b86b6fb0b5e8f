"""One HTML file that shows a prediction offline: no request leaves the page, and its policy forbids any.

Charts are HTML that reads without script; the timeline and memory over time are canvases drawn from columns in
the page, each with a table that says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.answer.prediction import FORMAT_VERSION, Prediction
from meshwright.atomic import write_bytes
from meshwright.quantity import big, gibibytes, seconds
from meshwright.report import charts, columns, document, facts, feed_text, palette
from meshwright.report.remedies import remedies

STYLES = ("base.css", "charts.css", "timeline.css")
SCRIPTS = ("theme.js", "columns.js", "spans.js", "draw.js", "timeline.js", "memory.js", "panels.js", "start.js")


def write(prediction: Prediction, path: str | Path) -> None:
    """Write the report of `prediction` to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(prediction).encode("utf-8"))


def render(prediction: Prediction) -> str:
    """The report as one HTML document."""
    return document.render("report.html.j2", **_context(prediction))


def section(name: str, prediction: Prediction) -> str:
    """One of :data:`SECTIONS` of the report, for a page that has its styles and scripts already."""
    template, context = SECTIONS[name]
    return document.render(template, p=prediction, **context(prediction))


def _context(prediction: Prediction) -> dict[str, Any]:
    context = {
        "p": prediction,
        "format_version": FORMAT_VERSION,
        "styles": [document.static(name) for name in STYLES],
        "scripts": [document.static(name) for name in SCRIPTS],
        "light": palette.css("light"),
        "dark": palette.css("dark"),
        "theme_colours": palette.THEMES,
        "headline": facts.headline(prediction),
        "params": big(prediction.model.num_params),
    }
    for _, part in SECTIONS.values():
        context |= part(prediction)
    return context


def _verdict(prediction: Prediction) -> dict[str, Any]:
    return {
        "verdict": facts.verdict(prediction),
        "remedies": remedies(prediction),
        "interval": [seconds(t) for t in prediction.step_time_interval_s],
        "interval_at": _interval_positions(prediction),
        "step": seconds(prediction.step_time_s),
        "peak": gibibytes(prediction.tightest.peak_bytes),
        "capacity": gibibytes(prediction.tightest.capacity_bytes),
        "money": facts.money(prediction),
    }


def _time(prediction: Prediction) -> dict[str, Any]:
    return {
        "waterfall": charts.waterfall(prediction),
        "sensitivities": charts.sensitivities(prediction),
        "beside": [
            ("Pools", facts.pools(prediction)),
            ("Frozen layers", facts.filled(prediction)),
            ("Over drawn batches", facts.batches(prediction)),
            ("Ranks that vary", facts.stragglers(prediction)),
            ("Is it the data?", feed_text.lines(prediction)),
        ],
    }


def _memory(prediction: Prediction) -> dict[str, Any]:
    over_time = columns.memory_payload(prediction.timeline, prediction.memory)
    return {"memory": charts.memory(prediction), "memory_over_time": over_time}


def _step(prediction: Prediction) -> dict[str, Any]:
    timeline = prediction.timeline
    return {
        "timeline": columns.payload(timeline),
        "ranks": charts.ranks(timeline),
        "waits": charts.waits(timeline),
        "path_count": len(timeline.critical_path()),
        "makespan": seconds(timeline.makespan_s),
        "timed": "one step",
    }


def _layers(prediction: Prediction) -> dict[str, Any]:
    return {"zooms": [_zoom(zoom) for zoom in prediction.zooms]}


def _basis(prediction: Prediction) -> dict[str, Any]:
    return {"money": facts.money(prediction), "training_run": facts.training_run(prediction)}


#: Section -> its template, and what that draws of a prediction. Sections but the first two need its details.
SECTIONS: dict[str, tuple[str, Callable[[Prediction], dict[str, Any]]]] = {
    "verdict": ("tiles.html.j2", _verdict),
    "basis": ("basis.html.j2", _basis),
    "time": ("waterfall.html.j2", _time),
    "memory": ("memory.html.j2", _memory),
    "step": ("step.html.j2", _step),
    "layers": ("layers.html.j2", _layers),
}


def _zoom(zoom) -> dict[str, Any]:
    timeline = zoom.timeline
    rows = [
        {
            "name": timeline.keys[timeline.cost_key[i]],
            "queue": columns.QUEUES[timeline.queue[i]],
            "start": seconds(float(timeline.start_s[i])),
            "length": seconds(float(timeline.end_s[i] - timeline.start_s[i])),
        }
        for i in timeline.start_s.argsort(kind="stable")[:400]
    ]
    return {
        "name": zoom.name,
        "data": columns.payload(timeline, max_spans=columns.MAX_SPANS // 10),
        "rows": rows,
        "total": timeline.num_spans,
        "makespan": seconds(timeline.makespan_s),
        "timed": "one step",
    }


def _interval_positions(prediction: Prediction) -> dict[str, float]:
    """Where interval and step time lie on a track that starts a little below the interval, in percent."""
    low, high = prediction.step_time_interval_s
    room = max(high - low, 1e-12) * 0.25
    first, whole = low - room, high - low + 2 * room
    return {
        "left": 100 * (low - first) / whole,
        "width": 100 * (high - low) / whole,
        "step": min(max(100 * (prediction.step_time_s - first) / whole, 0.0), 100.0),
    }
