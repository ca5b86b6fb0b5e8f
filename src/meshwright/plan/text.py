"""A plan's text form: words such as ``tp8 pp4 dp2 zero1 interleaved vpp2 mb1 selective``, in any order.

The fields of the facets are the grammar: reading and writing both walk them, so they cannot disagree.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from meshwright import schedules
from meshwright.catalog import meant
from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.plan.facet import ALONE, KEYED, NUMBERED, Field, number
from meshwright.plan.facets import facets, fields
from meshwright.plan.record import Plan

_NUMBERED = re.compile(r"([a-z_]+)(\d+)")
#: What words say: (facet, attribute) -> (word, value).
Said = dict[tuple[str, str], tuple[str, Any]]
Settings = tuple[tuple[str, str, Any], ...]


def read(text: str, *, place: str = "--plan") -> Plan:
    """The plan that the words say; what they leave open keeps its default, ``dp`` 0 (to be filled in).

    Raises:
        MeshwrightError: P001 unknown word, P002 bad value, P003 contradiction; all at once.
    """
    return _put_over(Plan(), _said(text, place))


def over(plan: Plan, text: str, *, place: str = "--plan") -> Plan:
    """Return `plan` with the settings of the words in place of its own; a schedule brings its own number of chunks.

    Raises:
        MeshwrightError: as :func:`read`.
    """
    return _put_over(plan, _said(text, place))


def says(text: str, name: str) -> bool:
    """Whether the words of a plan say a field, or anything of a facet; errors as :func:`read`."""
    said = _said(text, "--plan")
    if name in fields():
        field = fields()[name]
        return any((field.facet, attribute) in said for attribute in field.attributes)
    return any(of == name for of, _ in said)


@cache
def plain_words() -> dict[str, Settings]:
    """Return the words that stand alone (``sp``, ``full``), each with its settings."""
    out: dict[str, Settings] = {}
    for field in fields().values():
        alone = field.spelled == ALONE and field.form.kind is str
        named = {name: field.sets(name) for name in field.form.names if alone and name != "none"}
        for word, values in (named | field.also).items():
            out[word] = tuple((field.facet, attribute, value) for attribute, value in values.items())
    return out


@cache
def numbered_words() -> dict[str, Field]:
    """The words that are a name and a number."""
    found = fields().values()
    return {name: f for f in found for name in (*((f.name,) if f.spelled == NUMBERED else ()), *f.numbered)}


@cache
def keyed_words() -> dict[str, Field]:
    """The words of the form ``key=value``."""
    return {field.name: field for field in fields().values() if field.spelled == KEYED}


def examples() -> list[str]:
    """Words of every kind, as they are proposed to who misspelt one."""
    numbered = (f"{name}{n}" for name in numbered_words() for n in ((0, 1, 2, 3) if name == "zero" else (1, 2, 4, 8)))
    return [*plain_words(), *schedules.families(), *numbered, *(f"{key}=" for key in keyed_words())]


def _put_over(base: Plan, said: Said) -> Plan:
    """Return `base` with the given settings in place of its own, and with the settings that they imply."""
    plan = _with_said(base, said)
    for name, facet in facets().items():
        words = {attribute for of, attribute in said if of == name}
        if facet.implied:
            plan = msgspec.structs.replace(plan, **{name: facet.implied(plan, words, base == Plan())})
    for name, facet in facets().items():
        open_ = not any(of == name and attribute not in facet.beside for of, attribute in said)
        if facet.usual and open_ and getattr(base, name) == facet.usual(base):
            plan = msgspec.structs.replace(plan, **{name: facet.usual(plan)})
    return plan


def _said(text: str, place: str) -> Said:
    found: list[Diagnostic] = []
    said: Said = {}
    for word in text.lower().split():
        try:
            settings = _settings(word)
        except MeshwrightError as error:
            help = _respelled(word)
            for d in error.diagnostics:
                found.append(msgspec.structs.replace(d, place=f"{place} {text!r}: {word}", help=help or d.help))
            continue
        for facet, attribute, value in settings:
            before = said.get((facet, attribute))
            if before and before[1] != value:
                found.append(
                    Diagnostic(
                        code="P003",
                        message=f"{before[0]!r} and {word!r} contradict each other",
                        place=f"{place} {text!r}",
                        help="keep one of them",
                    )
                )
            said[facet, attribute] = (word, value)
    if found:
        raise MeshwrightError(found)
    return said


def _with_said(base: Plan, said: Said) -> Plan:
    changed: dict[str, dict[str, Any]] = {}
    for (facet, attribute), (_, value) in said.items():
        changed.setdefault(facet, {})[attribute] = value
    records = {facet: msgspec.structs.replace(getattr(base, facet), **values) for facet, values in changed.items()}
    return msgspec.structs.replace(base, **records)


def _settings(word: str) -> Settings:
    """Return the settings of one word of a plan, (facet, attribute, value) each."""
    if word in plain_words():
        return plain_words()[word]
    key, equals, value = word.partition("=")
    if equals:
        field = keyed_words().get(key)
        if field is None:
            raise MeshwrightError.one("P001", f"unknown key {key!r} in a plan", help=meant(key, [*keyed_words()]))
        return _valued(field, field.form.read(value), f"{word} is not {field.form.wanted}")
    if (match := _NUMBERED.fullmatch(word)) and (field := numbered_words().get(match[1])):
        if match[1] in field.numbered:
            ranks = number(match[2])
            if ranks:
                return tuple((field.facet, name, value) for name, value in field.numbered[match[1]](ranks).items())
        else:
            return _valued(field, field.form.read(match[2]), f"{word}: {match[1]} is {field.form.wanted}")
    return _looked_up(word)


def _respelled(word: str) -> str:
    """A help line for a word that is legal ones with commas between them, or a size behind ``=``; else ""."""
    parts = [part for part in word.split(",") if part]
    sizes = [re.fullmatch(r"([a-z]+)=(\d+)", part) for part in parts]
    parts = [f"{s[1]}{s[2]}" if s and s[1] in numbered_words() else part for part, s in zip(parts, sizes)]
    if " ".join(parts) == word:
        return ""
    try:
        for part in parts:
            _settings(part)
    except MeshwrightError:
        return ""
    return f"write {' '.join(parts)}: words of a plan have spaces between them, and a size follows its name"


def _valued(field: Field, value: Any, problem: str) -> Settings:
    if value is None:
        raise MeshwrightError.one("P002", problem)
    return tuple((field.facet, attribute, each) for attribute, each in field.sets(value).items())


def _looked_up(word: str) -> Settings:
    """Return the settings of a word that names an entry of an open list, such as a schedule."""
    for field in fields().values():
        if field.form.open:
            try:
                return _valued(field, field.form.read(word), f"{word} is not {field.form.wanted}")
            except MeshwrightError as error:
                if error.diagnostics[0].code.startswith("P"):
                    raise
    name = word.lower()
    sized = f"it wants a number behind it: {name}2; meshwright explain {name}" if name in numbered_words() else ""
    raise MeshwrightError.one("P001", f"unknown word {word!r} in a plan", help=sized or meant(word, examples()))
