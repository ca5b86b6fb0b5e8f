"""The page itself: its document, its files, and the names that its fields complete."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from meshwright import catalog as entries
from meshwright.cost import frameworks
from meshwright.export.engines import ENGINES
from meshwright.quantity import big, gibibytes
from meshwright.report import palette
from meshwright.report.html import STYLES as REPORT_STYLES
from meshwright.spec import cluster as clusters
from meshwright.spec import model as models

#: Scripts in the order they run; the report's are its own files.
REPORT_SCRIPTS = ("theme.js", "columns.js", "spans.js", "draw.js", "timeline.js", "memory.js", "panels.js")
SCRIPTS = ("ask.js", "state.js", "fields.js", "answer.js", "tabs.js", "recipes.js", "pareto.js", "search.js", "ui.js")
STYLES = ("ui.css",)
THEME = "theme.css"


def render(start: dict[str, Any]) -> str:
    """The document; `start` is the question that it opens with when its address says none."""
    environment = Environment(
        loader=PackageLoader("meshwright.ui", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("ui.html.j2").render(
        start=start,
        styles=(THEME, *REPORT_STYLES, *STYLES),
        scripts=(*REPORT_SCRIPTS, *SCRIPTS),
        schedules=_schedules(),
        engines=ENGINES,
    )


@cache
def static(name: str) -> str | None:
    """The text of a style or script of the page; None for any other name."""
    if name == THEME:
        return _theme()
    if name in (*REPORT_STYLES, *REPORT_SCRIPTS):
        return files("meshwright.report").joinpath("static", name).read_text(encoding="utf-8")
    if name in (*STYLES, *SCRIPTS):
        return files("meshwright.ui").joinpath("static", name).read_text(encoding="utf-8")
    return None


def _theme() -> str:
    """The report's colours: the system's theme unless the switch says another."""
    light, dark = palette.css("light"), palette.css("dark")
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f':root[data-theme="light"] {{ color-scheme: light; {light} }}\n'
        f':root[data-theme="dark"] {{ color-scheme: dark; {dark} }}\n'
    )


@cache
def catalog() -> dict[str, Any]:
    """Names that the fields complete, each with a few words about it."""
    known = [(name, models.in_catalog(name)) for name in entries.names("models")]
    return {
        "models": [[name, f"{big(m.num_params)}, {m.num_layers} layers"] for name, m in known if m is not None],
        "clusters": [
            *([f"8x{d.name}", f"8 x {gibibytes(d.memory_bytes)}"] for d in clusters.devices()),
            *([c.name, c.title or f"{c.num_devices:,} devices"] for c in clusters.clusters()),
        ],
        "frameworks": [[name, profile.title] for name, profile in frameworks().items()],
    }


def _schedules() -> list[tuple[str, str]]:
    from meshwright.schedules import families

    return [(family.name, family.title) for family in families().values()]
