"""Writing TOML: plain tables of strings, numbers, lists and tables, read back equal by :mod:`tomllib`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
