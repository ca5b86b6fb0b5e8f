"""Data, not code: devices, clusters, models, terms and error codes, each number with its source.

Files are shipped with the package, but for what ``meshwright calibrate --here`` measured on this machine, which lies in
the user's data folder. Nothing executes them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, nearest


def folder(kind: str) -> Path:
    """The catalog folder of one kind: ``devices``, ``clusters``, ``links``, ``models``, ``codes`` or ``terms``."""
    return Path(__file__).parent / kind


def measured_here() -> Path:
    """Return the folder of tables measured on this machine: ``$MESHWRIGHT_HOME``, else the user's data folder."""
    given = os.environ.get("MESHWRIGHT_HOME")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "meshwright"


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
    """Return the explanation of a term or an error code: its entry of ``terms/`` or ``codes/``, and its name.

    Raises:
        MeshwrightError: X001 when neither has the word; names the nearest.
    """
    known = tables("codes") | tables("terms")
    by_lower = {k.lower(): k for k in known}
    if word.lower() in by_lower:
        key = by_lower[word.lower()]
        return {"name": key, **known[key]}
    raise MeshwrightError.one("X001", f"no explanation of {word!r}", help=nearest(word, list(known)))


@cache
def words() -> dict[str, str]:
    """Everything that an explained word can be called, in small letters -> its entry: its name, its other names, and
    what its title says before the colon (``tensor parallelism``)."""
    entries = tables("codes") | tables("terms")
    known: dict[str, str] = {}
    for name, entry in entries.items():
        known.setdefault(entry["title"].partition(":")[0].lower(), name)
        known |= {other.lower(): name for other in entry.get("aliases", ())}
    return known | {name.lower(): name for name in entries}


def meant(word: str, choices: Sequence[str]) -> str:
    """A help line for a `word` that is none of the `choices`: the choice that it is another name of, else where the
    word is explained, else the nearest choices."""
    name = words().get(word.lower())
    if name is None:
        return nearest(word, choices)
    if name in choices:
        return f"did you mean {name}?"
    return f"{tables('terms').get(name, {}).get('title', name)}: meshwright explain {name}"
