"""Differences of two records: the fields that differ, as dotted paths with both values in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

#: Fields that say where a number comes from or what a thing is called, not what it is.
NOT_COMPARED = {"name", "title", "source", "sources", "aliases", "notes", "unknown_fields", "differs_from"}
#: A device's standard surroundings: what counts are the island's own.
STANDARD_TREE = {"node", "levels"}
ABSENT = "absent"
#: Lists of plain values longer than this are named by their length.
SHORT_LIST = 8


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A field whose values differ, both as text."""

    field: str
    a: str
    b: str


def differences(name: str, a: Any, b: Any) -> list[Difference]:
    """The fields of two records (msgspec structs, or plain values) that differ, their paths below `name`."""
    left, right = (dict(_leaves(name, msgspec.to_builtins(side))) for side in (a, b))
    return [
        Difference(field=path, a=_text(left, path), b=_text(right, path))
        for path in dict.fromkeys([*left, *right])
        if left.get(path, ABSENT) != right.get(path, ABSENT)
    ]


def words(name: str, a: str, b: str) -> list[Difference]:
    """The keys of two texts ``key=value,key=value`` whose values differ."""
    left, right = (dict(word.partition("=")[::2] for word in text.split(",") if word) for text in (a, b))
    return [
        Difference(field=f"{name}.{key}", a=left.get(key, ABSENT), b=right.get(key, ABSENT))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in NOT_COMPARED and not (path.endswith(".device") and key in STANDARD_TREE):
                yield from _leaves(f"{path}.{key}", inner)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, value


def _text(leaves: dict[str, Any], path: str) -> str:
    if path not in leaves:
        return ABSENT
    value = leaves[path]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple) and len(value) > SHORT_LIST:
        return f"{len(value)} values: {', '.join(map(str, value[:SHORT_LIST]))}, ..."
    return str(value)
