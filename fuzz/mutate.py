"""Mutations: a text becomes one that is nearly right, by its grammar or by its bytes."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

#: Numbers, quoted texts, words, white space, and any other character.
TOKEN = re.compile(r"[+-]?\d[\w.]*|\"[^\"\n]*\"|[A-Za-z_][\w-]*|\s+|.", re.DOTALL)
#: Numbers at the edges of what types, units and grammars hold; digits that are none to `int`.
_EDGES = (
    "0 1 2 3 4 5 7 8 16 64 127 1000 4096 65536 1000000000 2147483648 9223372036854775808 -1 -0 -8 0.5 1.5 1e3 1e-320 "
    "1e309 nan inf -inf +4 00 08 0x10 1_000 1,000 8k 8ki 15t 1e400 0.0 -0.0 .5 5. 99999999999999999999999999 true null "
    "² ٣ ８ ½ Ⅷ"
)
NUMBERS = tuple(_EDGES.split())
#: Characters that end, nest, hide or break something.
CHARACTERS = "\0\t\r\n \"'\\/.,;:=+-*%#[]{}()<>|&$~`^_x×éß²٣８İı\u200b\u202e\ufeff\U0001f600\ud800"
SPLICED = 40


def text(rng: Random, seed: bytes, others: list[bytes]) -> bytes:
    """`seed` after one to four mutations; parts of `others` may find their way into it."""
    data = seed
    for _ in range(1 + (rng.random() < 0.5) + (rng.random() < 0.25) + (rng.random() < 0.1)):
        data = rng.choice(BY)(rng, data, others)
    return data


def by_token(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    """A token replaced, dropped, doubled, moved or taken from another text."""
    tokens = TOKEN.findall(data.decode("utf-8", "surrogateescape")) or [""]
    other = TOKEN.findall(rng.choice(others).decode("utf-8", "surrogateescape")) or [""]
    at = rng.randrange(len(tokens))
    # what matters is seldom white space
    at = at if tokens[at].strip() else rng.randrange(len(tokens))
    match rng.randrange(9):
        case 0:
            tokens[at] = rng.choice(NUMBERS)
        case 1:
            numbers = [i for i, token in enumerate(tokens) if token[-1:].isdigit()]
            if numbers:
                tokens[rng.choice(numbers)] = rng.choice(NUMBERS)
        case 2:
            tokens[at] = rng.choice(other)
        case 3:
            del tokens[at]
        case 4:
            tokens.insert(at, tokens[at])
        case 5:
            there = rng.randrange(len(tokens))
            tokens[at], tokens[there] = tokens[there], tokens[at]
        case 6:
            start = rng.randrange(len(other))
            tokens[at:at] = other[start : start + rng.randrange(1, SPLICED)]
        case 7:
            tokens[at] = tokens[at] * rng.choice((2, 3, 10, 100, 5000 if len(tokens[at]) == 1 else 20))
        case _:
            tokens[at] = f'"{tokens[at]}"' if rng.random() < 0.5 else tokens[at].strip('"')
    return "".join(tokens).encode("utf-8", "surrogatepass" if rng.random() < 0.01 else "replace")


def by_line(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    """A line dropped, doubled, moved or taken from another text."""
    lines, other = data.splitlines(keepends=True) or [b""], rng.choice(others).splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 2:
            lines.insert(at, rng.choice(other))
        case _:
            lines[at] = rng.choice(other)
    return b"".join(lines)


def by_byte(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    """Bytes flipped, cut, doubled or put in; a character of :data:`CHARACTERS` put in."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(4)))
    at, end = rng.randrange(len(data)), rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[: min(at, end)] + data[max(at, end) :]
        case 3:
            return data[:at] + data[min(at, end) : min(at, end) + SPLICED] + data[at:]
        case 4:
            return data[:at] + bytes([rng.randrange(256)]) + data[at:]
        case 5:
            return data[:at] + data[at : at + 1] * rng.choice((2, 64, 5000)) + data[at + 1 :]
        case _:
            character = rng.choice(CHARACTERS).encode("utf-8", "surrogatepass")
            return data[:at] + character + data[at + (rng.random() < 0.5) :]


def by_value(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    """A key or a value of a JSON text changed; a text that is none by its tokens."""
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return by_token(rng, data, others)
    holders = list(_holders(whole))
    if not holders:
        return by_token(rng, data, others)
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            value = holder.pop(key)
            holder[rng.choice([key, *holder]) + rng.choice(("", "_", "s", "x"))] = value
        case 2 if isinstance(holder[key], int | float):
            holder[key] = rng.choice(
                (holder[key] * 2, holder[key] + 1, -holder[key], holder[key] / 3, str(holder[key]))
            )
        case 3:
            holder[key] = holder[rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))]
        case _:
            holder[key] = rng.choice(VALUES)
    try:
        return json.dumps(whole).encode()
    except (ValueError, RecursionError):  # a value was put into itself
        return data[: len(data) // 2]


VALUES = (None, True, False, 0, 1, -1, 3, 7, 2**31, 2**63, 10**30, 0.5, 1e-300, 1e308, float("nan"), float("inf"))
VALUES += ("", "x", "8", "gelu", "none", [], [0], [1, 2, 3], ["x"], {}, {"x": 1}, [[]], "\0", "é" * 50)
BY = (by_token, by_token, by_token, by_line, by_byte, by_byte, by_value)


def _holders(value: Any):
    """Every object and list in a JSON value that holds something."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)
