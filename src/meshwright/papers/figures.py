"""Published figures, shipped with the package, each file with its source."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def load(name: str) -> dict[str, Any]:
    """The figures in ``data/NAME.json``; ``source`` in it says from where."""
    return json.loads(files("meshwright.papers").joinpath("data", f"{name}.json").read_text(encoding="utf-8"))
