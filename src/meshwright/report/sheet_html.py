"""A sheet as one HTML file that shows it offline, with its timeline where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.answer.prediction import FORMAT_VERSION
from meshwright.atomic import write_bytes
from meshwright.quantity import seconds
from meshwright.report import charts, columns, document, palette
from meshwright.report.html import SCRIPTS, STYLES
from meshwright.report.palette import STACK
from meshwright.report.sheet import Lines, Sheet, SheetSection, Spent, shown


def write(sheet: Sheet, path: str | Path) -> None:
    """Write a sheet to `path` as a page, whole or not at all.

    Raises:
        MeshwrightError: X104 when the file cannot be written.
    """
    write_bytes(path, render(sheet).encode("utf-8"))


def render(sheet: Sheet) -> str:
    """Return a sheet as one HTML document."""
    timeline = sheet.timeline
    context: dict[str, Any] = {
        "p": sheet,
        "verdict": [sheet.headline],
        "remedies": (),
        "format_version": FORMAT_VERSION,
        "styles": [document.static(name) for name in STYLES],
        "scripts": [document.static(name) for name in SCRIPTS if timeline is not None or name == "theme.js"],
        "light": palette.css("light"),
        "dark": palette.css("dark"),
        "sections": [_drawn(section) for section in sheet.sections],
        "memory": charts.memory(sheet) if sheet.memory else None,
        "elsewhere": [_drawn(section) for section in sheet.elsewhere],
    }
    if timeline is not None:
        context |= {
            "timeline": columns.payload(timeline),
            "ranks": charts.ranks(timeline),
            "waits": charts.waits(timeline),
            "path_count": len(timeline.critical_path()),
            "makespan": seconds(timeline.makespan_s),
            "timed": sheet.timed,
            "memory_over_time": columns.memory_payload(timeline, sheet.memory) if timeline.memory else None,
        }
    return document.render("sheet.html.j2", **context)


def _drawn(section: SheetSection) -> dict[str, Any]:
    """The values that the template draws of a section."""
    if isinstance(section, Spent):
        rows = [
            {
                "name": name,
                "time": seconds(spent),
                "share": f"{spent / section.total_s:.1%}",
                "left": 100 * at / section.total_s,
                "width": 100 * spent / section.total_s,
                "words": words,
                "colour": STACK[number % len(STACK)],
            }
            for number, (name, at, spent, words) in enumerate(shown(section))
        ]
        return {"kind": "spent", "title": section.title, "rows": rows, "total": seconds(section.total_s)}
    if isinstance(section, Lines):
        rows = [(name, value, "; ".join(more)) for name, value, *more in section.rows]
        return {"kind": "lines", "title": section.title, "rows": rows, "remarks": section.remarks}
    return {"kind": type(section).__name__.removeprefix("Sheet").lower(), **section._asdict()}
