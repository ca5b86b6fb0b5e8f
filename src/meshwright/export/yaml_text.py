"""Writing YAML: mappings and lists of texts, numbers and booleans, in what every YAML 1.1 and 1.2 reader agrees on.

Texts are in double quotes, with JSON's escapes where YAML shares them, so that no word is taken for a number, a date or
a boolean; plain lines stand as they are below their key. Numbers have no exponent, which the versions read differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

Value = str | int | float | bool | None | Sequence["Value"] | Mapping[str, "Value"]


def dumps(table: Mapping[str, Value]) -> str:
    """The YAML text of a mapping, in its order."""
    return "\n".join(_lines(table, "")) + "\n"


def _lines(table: Mapping[str, Value], indent: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_key(key)}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, str) and LITERAL.fullmatch(value):
            yield f"{indent}{_key(key)}: |"
            yield from (f"{indent}  {line}".rstrip() for line in value.splitlines())
        elif isinstance(value, list | tuple) and value:
            yield f"{indent}{_key(key)}:"
            for item in value:
                yield from _item(item, indent + "  ")
        else:
            yield f"{indent}{_key(key)}: {_scalar(value)}"


def _item(value: Value, indent: str) -> Iterator[str]:
    """Yield the lines of an item of a list; a mapping begins behind the dash."""
    if isinstance(value, Mapping) and value:
        first, *rest = _lines(value, indent + "  ")
        yield f"{indent}- {first.lstrip()}"
        yield from rest
    else:
        yield f"{indent}- {_scalar(value)}"


def _key(key: str) -> str:
    return key if PLAIN.fullmatch(key) and key.lower() not in RESERVED else _quoted(key)


#: A key that needs no quotes.
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*(?:[./-][A-Za-z0-9_]+)*")
#: A text of several plain lines, which is written as it is below its key.
LITERAL = re.compile(r"[!-~](?:[ -~]*[!-~])?\n(?:[ -~]*[!-~]\n)+")
RESERVED = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
"""Words that YAML 1.1 reads as something else than themselves."""


def _quoted(text: str) -> str:
    """JSON's escapes up to ASCII; beyond it one escape a character, where JSON has two."""
    return "".join(c if " " <= c < "\x7f" else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))


def _scalar(value: Value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        return f"{value:f}".rstrip("0").removesuffix(".") + ("" if value % 1 else ".0")
    if isinstance(value, int):
        return str(value)
    return "{}" if isinstance(value, Mapping) else "[" + ", ".join(map(_scalar, value)) + "]"
