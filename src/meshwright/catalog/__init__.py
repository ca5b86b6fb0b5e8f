"""Data, not code: devices, clusters, models, terms and error codes, each number with its source.

Everything here reads files shipped with the package; nothing executes them.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from meshwright.errors import MeshwrightError, nearest


def folder(kind: str) -> Traversable:
    """The catalog folder of one kind: ``devices``, ``clusters``, ``models``, ``codes`` or ``terms``."""
    return files("meshwright.catalog").joinpath(kind)


@cache
def names(kind: str) -> tuple[str, ...]:
    """The entries of a kind, sorted, without file ending."""
    found = (f.name for f in folder(kind).iterdir())
    return tuple(sorted(n.rsplit(".", 1)[0] for n in found if n.endswith((".toml", ".json"))))


@cache
def tables(kind: str) -> dict[str, dict[str, Any]]:
    """Every TOML table of a kind whose files hold several entries (``codes``, ``terms``), merged."""
    merged: dict[str, dict[str, Any]] = {}
    for file in sorted(folder(kind).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            merged |= tomllib.loads(file.read_text(encoding="utf-8"))
    return merged


def explanation(word: str) -> dict[str, Any]:
    """What a term or an error code means: the entry of ``terms/`` or ``codes/``.

    Raises:
        MeshwrightError: X001 when neither has the word; names the nearest.
    """
    known = tables("codes") | tables("terms")
    by_lower = {k.lower(): k for k in known}
    if word.lower() in by_lower:
        key = by_lower[word.lower()]
        return {"name": key, **known[key]}
    raise MeshwrightError.one("X001", f"no explanation of {word!r}", help=nearest(word, list(known)))
