"""TOML read from files and written: plain tables of strings, numbers, lists and tables, read back equal."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def loaded(path: str | Path, code: str, help: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a file and its table.

    Raises:
        MeshwrightError: `code`, with `help`, for a file that cannot be read or that is no TOML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return text, tomllib.loads(text)
    except OSError as error:
        reason = error.strerror or str(error)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # numbers of thousands of digits and bytes that are no UTF-8 among them
        reason = str(error)
    raise MeshwrightError.one(code, f"{path} cannot be read: {reason}", place=str(path), help=help)


def dumps(table: Mapping[str, Any]) -> str:
    """The TOML text of a table; scalars first, then sub-tables, then arrays of tables, in their given order."""
    return "\n".join(_lines(table, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    later = []
    for key, value in table.items():
        if isinstance(value, Mapping) or _is_tables(value):
            later.append((key, value))
        else:
            yield f"{_key(key)} = {_scalar(value)}"
    for key, value in later:
        inner = (*path, key)
        header = ".".join(_key(part) for part in inner)
        for row in [value] if isinstance(value, Mapping) else value:
            yield from ("", f"[{header}]" if isinstance(value, Mapping) else f"[[{header}]]")
            yield from _lines(row, inner)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(row, Mapping) for row in value)


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    return "[" + ", ".join(_scalar(item) for item in value) + "]"
