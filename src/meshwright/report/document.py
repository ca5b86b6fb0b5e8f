"""The templates of the reports: what is missing in a context is an error, and every value is escaped."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, **context: Any) -> str:
    """One offline HTML document, or a part of one."""
    return _environment().get_template(template).render(**context)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("meshwright.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def static(name: str) -> Markup:
    """A style or script of the package, as it is: it is ours, so it is not escaped."""
    return Markup(files("meshwright.report").joinpath("static", name).read_text(encoding="utf-8"))
