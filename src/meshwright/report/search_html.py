"""The answer of a search as one offline HTML file: table, Pareto plot, why plans were rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.atomic import write_bytes
from meshwright.report import document, facts, palette
from meshwright.report.search_text import HEADS, cells, coverage, shown, verdict, words
from meshwright.search.found import OBJECTIVES, Found

#: Size of the plot in its own units, and the room for its labels.
WIDTH, HEIGHT, MARGIN = 640.0, 280.0, 40.0


def write(found: Found, path: str | Path) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(found).encode("utf-8"))


def render(found: Found) -> str:
    """The report as one HTML document."""
    most = max(found.pruned.values(), default=1)
    return document.render(
        "search.html.j2",
        verdict=verdict(found),
        coverage=coverage(found),
        light=palette.css("light"),
        dark=palette.css("dark"),
        heads=(*HEADS, "plan"),
        rows=[((*cells(r), words(r)), r.delta, r.tie) for r in found.best],
        training_run=facts.training_run(found.best[0].prediction) if found.best else [],
        misses=found.misses,
        pruned=[
            {"why": why, "count": f"{n:,}", "width": 100 * n / most}
            for why, n in sorted(found.pruned.items(), key=lambda item: -item[1])
        ],
        objectives=[OBJECTIVES[o] for o in found.objectives],
        points=_points(found),
        width=WIDTH,
        height=HEIGHT,
        margin=MARGIN,
    )


def _points(found: Found) -> list[dict[str, Any]]:
    """The front as points of the plot; the better corner is at the lower left."""
    values = [v for _, v in found.pareto]
    spans = [(min(column), max(column)) for column in zip(*values)]

    def place(value: float, axis: int) -> float:
        low, high = spans[axis]
        return (value - low) / (high - low) if high > low else 0.5

    return [
        {
            "x": MARGIN + place(v[0], 0) * (WIDTH - 2 * MARGIN),
            "y": HEIGHT - MARGIN - place(v[1], 1) * (HEIGHT - 2 * MARGIN),
            "plan": plan.text(),
            "values": [shown(o, x) for o, x in zip(found.objectives, v)],
        }
        for plan, v in found.pareto
    ]
