"""Time and cost over the number of devices as one offline HTML file: the answer, both curves, the table, what has no
plan."""

from __future__ import annotations

from pathlib import Path

from meshwright.atomic import write_bytes
from meshwright.report import document, palette
from meshwright.report.scaling_plot import panel_figure, panels
from meshwright.report.scaling_text import TIES, answer, cells, heads, remarks
from meshwright.search.scaling import Scaling

STYLES = ("base.css", "scaling.css")


def write(scaling: Scaling, path: str | Path) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(scaling).encode("utf-8"))


def render(scaling: Scaling) -> str:
    """The report as one HTML document."""
    rows = [(cells(p, scaling), p.good, _chosen(p, scaling)) for p in scaling.fitting]
    return document.render(
        "scaling.html.j2",
        title=", ".join(dict.fromkeys(p.curve for p in scaling.points)) or "clusters",
        model=scaling.fitting[0].prediction.model.name if scaling.fitting else "",
        answer=answer(scaling),
        met=bool(scaling.meeting),
        remarks=remarks(scaling),
        light=palette.css("light"),
        dark=palette.css("dark"),
        styles=[document.static(name) for name in STYLES],
        figures=[(panel.title, panel_figure(panel, scaling).svg()) for panel in panels(scaling)],
        heads=heads(scaling),
        rows=rows,
        ties=TIES if any("=" in cell for row, *_ in rows for cell in (row[1], row[3])) else "",
        refused=[(p.text, p.refused) for p in scaling.points if p.refused],
    )


def _chosen(point, scaling: Scaling) -> str:
    """Why a point is an answer; empty for the others."""
    named = {"cheapest": scaling.cheapest, "fastest": scaling.fastest, "nearest": scaling.nearest}
    return " and ".join(name for name, chosen in named.items() if chosen is point)
