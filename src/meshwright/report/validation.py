"""One HTML file that shows a validation offline: figures, measured against predicted, residuals, what was left out.

Everything is drawn as SVG when the page is written and reads without script; every plot of residuals has a table
that says the same. No request leaves the page, and its policy forbids any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from meshwright.atomic import write_bytes
from meshwright.quantity import seconds
from meshwright.report import document, palette, plots
from meshwright.validate import text
from meshwright.validate.faults import FAULTS
from meshwright.validate.run import FORMAT_VERSION, Table
from meshwright.validate.score import Scored
from meshwright.version import VERSION

#: Points drawn for a table, in its scatter plots together and in its plots of residuals together; in a plot of one
#: source's residuals. More rows than that are sampled, and the page says so.
MAX_POINTS, MAX_POINTS_OF_SOURCE = 20_000, 300
#: A source's own residuals are shown from so many timed rows on.
ENOUGH = 30
WORST = 12
#: What an honest 80% interval covers.
COVERAGE = (0.70, 0.90)


def write(found: list[Table], path: str | Path) -> None:
    """Write the report of a validation to `path`, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(found).encode("utf-8"))


def render(found: list[Table]) -> str:
    """The report as one HTML document."""
    return document.render(
        "validation.html.j2",
        tables=[_table(table) for table in found],
        meaning=text.MEANING,
        format_version=FORMAT_VERSION,
        code=VERSION,
        light=palette.css("light"),
        dark=palette.css("dark"),
        styles=[document.static("base.css"), document.static("validation.css")],
        scripts=[document.static("theme.js"), Markup("Meshwright.theme.start();")],
        size=(plots.WIDTH, plots.HEIGHT),
    )


def _table(table: Table) -> dict[str, Any]:
    timed = [s for s in table.scored if s.time is not None]
    sound = [s for s in timed if not s.faulty]
    return {
        "name": table.name,
        "headings": [heading for heading, _, _ in text.columns(table)],
        "lines": list(text.lines(table)),
        "all": table.metrics["all"],
        "scatters": _scatters(timed),
        "coverage": _coverage(table),
        "residuals": _residuals(table, sound, MAX_POINTS // max(1, len(table.variables))),
        "sources": _sources(table, sound),
        "worst": _worst(sound),
        "unsupported": table.reasons(),
        "faults": list(FAULTS.get(table.name, {}).items()),
        "flagged": [(k, int(m["rows"])) for k, m in table.metrics.items() if k.endswith("/flagged")],
    }


def _by_key(rows: list[Scored]) -> dict[str, list[Scored]]:
    found: dict[str, list[Scored]] = {}
    for s in rows:
        found.setdefault(s.key, []).append(s)
    return dict(sorted(found.items()))


def _scatters(timed: list[Scored]) -> list[dict[str, Any]]:
    """One plot per source and hardware; each is given its share of the points."""
    groups = _by_key(timed)
    share = min(1.0, MAX_POINTS / max(1, len(timed)))
    return [
        {
            "key": key,
            **plots.scatter(
                np.array([s.time[0] for s in rows]),
                np.array([s.time[1] for s in rows]),
                np.array([s.faulty for s in rows]),
                max(1, int(len(rows) * share)),
            ),
        }
        for key, rows in groups.items()
    ]


def _coverage(table: Table) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "share": m["coverage80"],
            "rows": int(m.get("timed_rows", 0)),
            "honest": COVERAGE[0] <= m["coverage80"] <= COVERAGE[1],
        }
        for key, m in table.metrics.items()
        if "coverage80" in m and (m.get("timed_rows", 0) >= ENOUGH or key == "all")
    ]


def _residuals(table: Table, rows: list[Scored], most: int) -> list[dict[str, Any]]:
    if not rows:
        return []
    ratio = np.array([s.time[1] / s.time[0] for s in rows])
    drawn = ((name, plots.residuals([s.at[i] for s in rows], ratio, most)) for i, name in enumerate(table.variables))
    return [{"variable": name, **plot} for name, plot in drawn if plot is not None]


def _sources(table: Table, rows: list[Scored]) -> list[dict[str, Any]]:
    """Residuals of each source alone: between sources, variables hide behind each other."""
    groups = {key: own for key, own in _by_key(rows).items() if len(own) >= ENOUGH}
    if len(_by_key(rows)) < 2:
        return []
    most = {key: min(MAX_POINTS_OF_SOURCE, len(own)) for key, own in groups.items()}
    return [{"key": key, "plots": _residuals(table, own, most[key])} for key, own in groups.items()]


def _worst(rows: list[Scored]) -> list[dict[str, str]]:
    """The rows furthest off, as a factor."""
    factors = np.array([abs(np.log(s.time[1] / s.time[0])) for s in rows])
    return [
        {
            "id": s.id,
            "key": s.key,
            "what": s.what,
            "measured": seconds(s.time[0]),
            "predicted": seconds(s.time[1]),
            "factor": f"{s.time[1] / s.time[0]:.2f}x",
        }
        for s in (rows[i] for i in np.argsort(-factors, kind="stable")[:WORST])
    ]
