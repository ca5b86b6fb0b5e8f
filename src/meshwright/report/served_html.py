"""Served requests, predicted against measured, as one offline HTML file: latencies, requests answered and waiting over
time, and tables that say the same."""

from __future__ import annotations

from pathlib import Path

from meshwright.atomic import write_bytes
from meshwright.compare.served import SHARES, ServedComparison
from meshwright.report import document, palette
from meshwright.report.figure import Drawing
from meshwright.report.line_plot import PlotLine, Scale, line_plot, spanned
from meshwright.report.served_text import tables, verdict
from meshwright.report.serving_plot import instant
from meshwright.report.serving_text import LATENCIES

STYLES = ("base.css", "charts.css", "serving.css")
#: The sides and their colours, and states over time: field of a window -> its title.
SIDES = (("predicted", "blue"), ("measured", "orange"))
STATES = {"batch": "Requests being answered", "queue": "Requests that wait for a first token"}


def write(comparison: ServedComparison, path: str | Path) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(comparison).encode("utf-8"))


def render(comparison: ServedComparison) -> str:
    """Return the report as one HTML document."""
    drawings = [*distributions(comparison), *states(comparison)]
    return document.render(
        "served.html.j2",
        verdict=verdict(comparison),
        near=comparison.near,
        differ=[f"{name} differs: {a} predicted, {b} measured" for name, (a, b) in comparison.differ.items()],
        figures=[drawing.svg() for drawing in drawings],
        tables=tables(comparison),
        light=palette.css("light"),
        dark=palette.css("dark"),
        styles=[document.static(name) for name in STYLES],
    )


def distributions(comparison: ServedComparison) -> list[Drawing]:
    """Return a cumulative distribution for each latency of requests, of both sides."""
    drawn = []
    for one in comparison.times:
        if not (one.predicted_cdf and one.measured_cdf):
            continue
        x = spanned([max(v, 1e-6) for v in (*one.predicted_cdf, *one.measured_cdf)], "", instant, logarithmic=True)
        y = Scale(low=0.0, high=1.0, title="", text=lambda v: f"{v:.0%}")
        lines = [
            PlotLine(
                name=side,
                colour=colour,
                points=[(max(v, 1e-6), s) for v, s in zip(getattr(one, f"{side}_cdf"), SHARES)],
            )
            for side, colour in SIDES
        ]
        what = LATENCIES[one.name]
        drawn.append(line_plot(f"Share of requests within a {what}, predicted and measured", what, x, y, lines))
    return drawn


def states(comparison: ServedComparison) -> list[Drawing]:
    """Return the requests that are answered, and those that wait, over time on both sides."""
    drawn, windows = [], comparison.windows
    for field, title in STATES.items():
        lines = [
            PlotLine(
                name=side,
                colour=colour,
                stepped=True,
                points=[(one.begin_s, getattr(one, f"{side}_{field}")) for one in windows],
            )
            for side, colour in SIDES
        ]
        x = spanned([one.begin_s for one in windows], "seconds", lambda v: f"{v:.4g}")
        y = spanned([v for line in lines for _, v in line.points], "", lambda v: f"{v:.4g}")
        along = [] if comparison.parts_s is None else [(comparison.parts_s, "they part")]
        drawn.append(line_plot(f"{title} over time, predicted and measured", title, x, y, lines, along=along))
    return drawn
