"""A plan as a TOML file: one table per facet, only what differs from the defaults, read strictly.

::

    format_version = 1
    [layout]
    tp = 8
    pp = 4
    [pipeline]
    schedule = "interleaved"
    vpp = 2

A plan of several pools has them as ``[pools.encoder]`` with ``on``, ``part`` and ``frozen``, and their facets below as
``[pools.encoder.layout]``; facets at the top are all pools'. ``links = ["encoder->lm"]`` where they are not a chain.

The question that a plan answers (:data:`QUESTION`) may stand before the tables; here it is passed over, so that one
file is a plan, and a whole question to ``meshwright predict`` and ``run``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from meshwright.atomic import write_bytes
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.plan.facets import facets
from meshwright.plan.pool_words import from_tables, tables
from meshwright.plan.record import FACETS, Plan
from meshwright.spec.toml_text import dumps

FORMAT_VERSION = 1
#: What a file may say beside the plan: what it was made for.
QUESTION = ("title", "model", "on", "train", "serve", "denoise", "rollout", "feed", "framework")
QUESTION += ("tokens", "days", "budget", "price", "world")


def dump(plan: Plan, question: Mapping[str, str] | None = None) -> str:
    """The TOML text of a plan, and of the `question` it is for; :func:`loads` gives the same plan back."""
    table: dict[str, Any] = {"format_version": FORMAT_VERSION, **(question or {})}
    return dumps(table | (tables(plan, _tables) if plan.several else _tables(plan)))


def _tables(plan: Plan) -> dict[str, Any]:
    """The tables of the facets of one pool, only what differs from the defaults."""
    default, table = Plan(), {}
    for facet in FACETS:
        value, usual = getattr(plan, facet), getattr(default, facet)
        rows = {}
        for name in value.__struct_fields__:
            entry = getattr(value, name)
            if entry != getattr(usual, name):
                rows[name] = list(entry) if isinstance(entry, tuple) else entry
        if rows:
            table[facet] = rows
    return table


def save(plan: Plan, path: str | Path, question: Mapping[str, str] | None = None) -> None:
    """Write a plan file whole or not at all.

    Raises:
        MeshwrightError: X104 when it cannot be written.
    """
    write_bytes(path, dump(plan, question).encode())


#: Kinds of values in a file, by Python's names of them.
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table",
}


def load(path: str | Path) -> Plan:
    """The plan in a file.

    Raises:
        MeshwrightError: P004 for every key and value that is wrong, with its place.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MeshwrightError.one("P004", f"cannot read the plan: {reason}", place=str(path)) from None
    return loads(text, place=str(path))


def loads(text: str, *, place: str = "plan.toml") -> Plan:
    """The plan that a TOML text describes; errors as in :func:`load`."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are a plain ValueError
        raise MeshwrightError.one("P004", f"not TOML: {error}", place=place) from None
    version = table.pop("format_version", None)
    if version != FORMAT_VERSION:
        older = "write format_version = 1 at its top" if version is None else "write it again with this version"
        raise MeshwrightError.one(
            "P004", f"format_version is {version!r}, this version reads {FORMAT_VERSION}", place=place, help=older
        )
    table = {key: rows for key, rows in table.items() if key not in QUESTION or not isinstance(rows, str | int | float)}
    if "pools" in table:
        return from_tables(table.pop("pools"), table.pop("links", []), place, partial(_plan, common=table))
    found: list[Diagnostic] = []
    plan = _plan(table, "", place, found)
    if found:
        raise MeshwrightError(found)
    return plan


def _plan(
    table: Mapping[str, Any], prefix: str, place: str, found: list[Diagnostic], common: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of one pool's tables and of those `common` to all; what is wrong is added to `found`."""
    plan, known = Plan(), [*FACETS]
    for facet, rows in [*(common or {}).items(), *table.items()]:
        where = prefix if facet in table else ""
        if facet not in known:
            text = f'is words in quotes, as on the command line: {facet} = "..."'
            found.append(
                _wrong(
                    place, where + facet, rows, text if facet in QUESTION else f"no such table; {nearest(facet, known)}"
                )
            )
            continue
        if not isinstance(rows, dict):
            found.append(_wrong(place, where + facet, rows, f"is a table: write [{where}{facet}] and its keys below"))
            continue
        current = getattr(plan, facet)
        values = {}
        for name, value in rows.items():
            problem, values[name] = _read(facet, current, name, value)
            if problem:
                found.append(_wrong(place, f"{where}{facet}.{name}", value, problem))
        if not found:
            plan = msgspec.structs.replace(plan, **{facet: msgspec.structs.replace(current, **values)})
    return plan


def _wrong(place: str, key: str, value: Any, problem: str) -> Diagnostic:
    return Diagnostic(code="P004", message=f"{key}: {problem}", place=f"{place}: {key} = {value!r}")


def _read(facet: str, current: msgspec.Struct, name: str, value: Any) -> tuple[str, Any]:
    """(what is wrong or "", the value as the facet stores it)."""
    if name not in current.__struct_fields__:
        return f"no such key; {nearest(name, list(current.__struct_fields__))}", None
    usual = getattr(current, name)
    if isinstance(usual, tuple):
        value = tuple(value) if isinstance(value, list) else value
    if isinstance(usual, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(usual):
        return f"wants {_kind(usual)}, not {_kind(value)}", None
    return _why_not(facet, name, value), value


def _kind(value: Any) -> str:
    """The kind of a value of a file, in words."""
    return KINDS.get(type(value).__name__, type(value).__name__)


def _why_not(facet: str, name: str, value: Any) -> str:
    """Why a value of the right type cannot be: the same rules as the words of a plan."""
    field = next((f for f in facets()[facet].fields if f.attribute == name), None)
    return field.why_not(value) if field else ""
