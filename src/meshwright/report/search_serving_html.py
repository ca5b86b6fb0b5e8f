"""A search for a serving plan as one offline HTML file: the best plans, the Pareto front, why every other one lost."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

from meshwright.atomic import write_bytes
from meshwright.quantity import big, latency
from meshwright.report import document, palette
from meshwright.report.figure import Drawing
from meshwright.report.line_plot import PlotLine, Scale, line_plot
from meshwright.report.search_serving_text import (
    HEADS,
    cells,
    coverage,
    kept_text,
    others,
    said,
    untold,
    valued,
    verdict,
)
from meshwright.report.serving_plot import instant
from meshwright.search.serving.found import FRONT, MORE, OBJECTIVES, RankedServing, ServingFound
from meshwright.search.serving.space import engine_words, words

STYLES = ("base.css", "charts.css", "serving.css")
#: Simulated plans that are drawn beside the front, and losers that are listed one by one.
MOST_POINTS, MOST_LOSERS = 400, 400


def write(found: ServingFound, path: str | Path) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(found).encode("utf-8"))


def render(found: ServingFound) -> str:
    """The report as one HTML document."""
    best = found.best or ((found.nearest,) if found.nearest is not None else ())
    most = max(found.reasons.values(), default=1)
    return document.render(
        "search_serving.html.j2",
        found=found,
        styles=[document.static(name) for name in STYLES],
        scripts=[document.static("theme.js")],
        light=palette.css("light"),
        dark=palette.css("dark"),
        cluster=" + ".join(cluster.name for cluster in found.clusters),
        verdict=verdict(found),
        coverage=coverage(found),
        objective=OBJECTIVES[found.objective],
        heads=HEADS,
        best=[_row(found, place, one) for place, one in enumerate(best)],
        tiles=_tiles(best[0]) if best else [],
        kept=[kept_text(one) for one in best[0].prediction.objectives] if best else [],
        figures=[figure.svg() for figure in figures(found)],
        front_heads=[FRONT[name] for name in found.front],
        front=[
            ([valued(name, v) for name, v in zip(found.front, values)], said(found, candidate))
            for candidate, values in found.pareto
        ],
        reasons=[
            (why, f"{n:,}", 100 * n / most) for why, n in sorted(found.reasons.items(), key=lambda pair: -pair[1])
        ],
        layouts=_layouts(found),
        losers=[(said(found, one.candidate), one.why) for one in found.losers[:MOST_LOSERS]],
        space=[(name, _values(values)) for name, values in found.space.domains.items()],
    )


def _row(found: ServingFound, place: int, one: RankedServing) -> dict[str, Any]:
    notes = [untold(one.tie)] if one.tie else []
    if one.variants:
        notes.append(f"{others(one)} on as many devices")
    return {
        "place": place + 1,
        "plan": words(one.candidate.plan),
        "engine": engine_words(one.candidate.engine, found.serve),
        "cluster": one.cluster.name if len(found.clusters) > 1 else "",
        "cells": cells(one),
        "notes": notes,
    }


def _tiles(one: RankedServing) -> list[tuple[str, str, str]]:
    """(what, value, note) of the first of the best."""
    m = one.prediction.metrics
    if m is None:
        return []
    tiles = [("Devices", f"{one.candidate.num_devices:,}", words(one.candidate.plan))]
    for name in ("ttft_s", "tpot_s"):
        summary = getattr(m, name)
        tiles.append((f"{name[:-2].upper()} p90", latency(summary.p90), f"{latency(summary.mean)} on average"))
    tiles.append(
        ("Throughput", f"{m.throughput_tokens_per_s:,.0f} tokens/s", f"{m.throughput_req_per_s:.3g} requests/s")
    )
    if one.usd_per_million_tokens is not None:
        tiles.append(("Per million tokens", f"${one.usd_per_million_tokens:.3g}", f"${one.usd_hour:,.4g} an hour"))
    if one.sure is not None:
        tiles.append(("Sure", f"{one.sure:.0%}", "of draws of the costs' errors keep every bound"))
    return tiles


def figures(found: ServingFound) -> list[Drawing]:
    """A panel for each pair of the front's values, with the simulated plans, the front and the best plan."""
    front = found.pareto
    if len(front) < 2:
        return []
    kept = {candidate for candidate, _ in front}
    others = [(c, v) for c, v in found.points if c not in kept][:MOST_POINTS]
    chosen = found.best[0].candidate if found.best else None
    drawn = []
    for i, j in list(combinations(range(len(found.front)), 2))[:3]:
        lines = []
        for name, colour, rows, radius in (
            ("simulated", "grey", others, 2.0),
            ("front", "blue", [row for row in front if row[0] != chosen], 4.0),
            ("best", "green", [row for row in found.points if row[0] == chosen][:1], 6.0),
        ):
            if rows:
                points = [(values[i], values[j]) for _, values in rows]
                titles = [said(found, candidate) for candidate, _ in rows]
                lines.append(
                    PlotLine(name=name, colour=colour, points=points, titles=titles, joined=False, radius=radius)
                )
        x, y = (_scale(found.front[k], [values[k] for _, values in (*front, *others)]) for k in (i, j))
        across, up = (FRONT[found.front[k]] for k in (i, j))
        label = f"Simulated plans by {across} and {up}; the table says the same of the front"
        better = " and ".join(_better(found.front[k]) for k in (i, j))
        drawn.append(line_plot(label, f"better: {better}", x, y, lines))
    return drawn


def _better(name: str) -> str:
    """Which values of the front are better, in words."""
    less = "fewer" if name == "devices" else "less"
    return f"{'more' if name in MORE else less} {FRONT[name]}"


def _count(value: float) -> str:
    """A number of devices on an axis; nothing between two of them."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-9 else ""


def _scale(name: str, values: list[float]) -> Scale:
    """The axis of a value of the front: times are logarithmic."""
    low, high = min(values), max(values)
    if name in ("e2e", "ttft", "tpot"):
        low = max(low, 1e-6)
        return Scale(
            low=low / 1.15, high=max(high, low * 1.2) * 1.15, title=FRONT[name], text=instant, logarithmic=True
        )
    text = {"cost": lambda v: f"${v:.4g}", "devices": _count}.get(name, big)
    room = 0.06 * ((high - low) or high or 1.0)
    return Scale(low=max(0.0, low - room), high=high + room, title=FRONT[name], text=text)


def _layouts(found: ServingFound) -> list[tuple[str, str]]:
    """The layouts that are not among the best, each with why the plan of it that got farthest lost."""
    return [(said(found, one.candidate), one.why) for one in found.lost_layouts]


def _values(values: tuple | None) -> str:
    """The values of a facet of the space as they are said."""
    if values is None:
        return "worked out from the devices"
    return ", ".join({True: "yes", False: "no", "": "-"}.get(v, str(v)) for v in values)
