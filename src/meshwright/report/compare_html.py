"""Predicted against measured as one offline HTML file: verdict, errors by kind and queue, both critical paths and both
timelines on one scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.atomic import write_bytes
from meshwright.compare import Comparison, Row, Side
from meshwright.compare.measured import middle, steps
from meshwright.graph import KINDS as TASK_KINDS
from meshwright.quantity import seconds
from meshwright.report import columns, compare_text, document, html, palette
from meshwright.timeline import Timeline

#: Links of a critical path that are listed.
MOST_LINKS = 200


def write(comparison: Comparison, predicted: Timeline, measured: Timeline, path: str | Path) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(comparison, predicted, measured).encode("utf-8"))


def render(comparison: Comparison, predicted: Timeline, measured: Timeline) -> str:
    """The report as one HTML document."""
    c = comparison
    return document.render(
        "compare.html.j2",
        c=c,
        verdict=compare_text.verdict(c),
        remarks=[*compare_text.remarks(c), compare_text.unmatched(c)],
        styles=[document.static(name) for name in html.STYLES],
        scripts=[document.static(name) for name in html.SCRIPTS],
        light=palette.css("light"),
        dark=palette.css("dark"),
        step_bars=_step_bars(c),
        tables=[("By kind of task", _rows(c.kinds)), ("By queue", _rows(c.queues))],
        shares=_shares(c),
        paths=[_path(word, side) for word, side in (("Predicted", c.predicted), ("Measured", c.measured))],
        path_kinds=_path_kinds(c),
        timelines=[_timeline("predicted", predicted), _timeline("measured", measured)],
    )


def _step_bars(c: Comparison) -> list[dict[str, Any]]:
    low, high = c.measured.spread_s
    whole = max(c.step_time_s.predicted, high, c.step_time_s.measured) or 1.0
    return [
        {
            "name": name,
            "time": seconds(value),
            "width": 100 * value / whole,
            "low": 100 * a / whole,
            "high": 100 * b / whole,
        }
        for name, value, a, b in (
            ("Predicted", c.step_time_s.predicted, *c.predicted.spread_s),
            ("Measured", c.step_time_s.measured, low, high),
        )
    ]


def _rows(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    whole = max((max(r.predicted_s, r.measured_s) for r in rows), default=1.0) or 1.0
    return [
        {
            "name": r.name,
            "matched": f"{r.matched:,}",
            "predicted": seconds(r.predicted_s) if r.matched else "",
            "measured": seconds(r.measured_s) if r.matched else "",
            "error": compare_text.percent(r.error) if r.matched else "",
            "alone": compare_text.alone(r),
            "predicted_width": 100 * r.predicted_s / whole,
            "measured_width": 100 * r.measured_s / whole,
        }
        for r in rows
    ]


def _shares(c: Comparison) -> list[tuple[str, str, str, str]]:
    rows = [("bubble", f"{c.bubble.predicted:.1%}", f"{c.bubble.measured:.1%}", "")]
    rows += [
        (f"exposed {p.name}", seconds(p.predicted), seconds(p.measured), compare_text.percent(p.error))
        for p in c.exposed_s
    ]
    return rows + ([compare_text.memory_row(c.peak_memory_bytes)] if c.peak_memory_bytes is not None else [])


def _path(word: str, side: Side) -> dict[str, Any]:
    links = [
        (link.name, link.rank, link.count, seconds(link.seconds), seconds(link.idle_s) if link.idle_s > 0 else "")
        for link in side.path[:MOST_LINKS]
    ]
    return {"name": word, "links": links, "more": len(side.path) - len(links)}


def _path_kinds(c: Comparison) -> list[dict[str, Any]]:
    whole = max(c.predicted.step_time_s, c.measured.step_time_s) or 1.0
    out = []
    for name in dict.fromkeys((*c.predicted.path_s, *c.measured.path_s)):
        pair = [side.path_s.get(name, 0.0) for side in (c.predicted, c.measured)]
        colour = palette.KINDS.get(name, "") if name in TASK_KINDS else ""
        out.append(
            {
                "name": name,
                "times": [seconds(v) if v else "-" for v in pair],
                "widths": [100 * v / whole for v in pair],
                "colour": colour,
            }
        )
    return out


def _timeline(word: str, timeline: Timeline) -> dict[str, Any]:
    found = steps(timeline)
    one = middle(found).timeline
    which = "" if len(found) == 1 else f", the median of {len(found)} steps"
    summary = (
        f"Timeline {word}{which}: {len(one.ranks)} ranks, {one.num_spans} tasks, {seconds(one.makespan_s)} in all."
    )
    return {"id": word, "title": f"{word.capitalize()}{which}", "data": columns.payload(one), "summary": summary}
