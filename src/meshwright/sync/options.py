"""Options of rules and codecs: what may stand behind a name, as in ``local:h=8,codec=topk,share=0.01``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from meshwright.errors import Diagnostic, MeshwrightError
from meshwright.sync import divided

#: The text of an empty set of numbers.
NONE = "none"


class RuleOption(msgspec.Struct, frozen=True, kw_only=True):
    """An option of a rule or a codec: a whole number of at least ``least``, one of ``choices``, where ``share`` a part
    of one above 0 and up to ``most`` (with ``least`` 0 it may be 0 too), where ``duration`` seconds, of words such
    as 30s, where ``numbered`` a set of numbers from 0 on, as :func:`runs` writes it, or where ``parted`` the parts of a
    whole that replicas have, as ``divided.written`` writes them, where ``leveled`` a number for each level, as 2x2.
    ``default`` None: it must be said, such as ``example``."""

    name: str
    what: str
    default: Any = None
    example: Any = None
    least: int = 1
    choices: Callable[[], tuple[str, ...]] = tuple
    share: bool = False
    most: float = 1.0
    duration: bool = False
    numbered: bool = False
    parted: bool = False
    leveled: bool = False

    @property
    def wanted(self) -> str:
        """The legal values of the option, in words."""
        if self.duration:
            return "a duration, such as 500ms, 30s or 10m"
        if self.numbered:
            return f"a set of numbers, such as 0-5+9, or {NONE}"
        if self.parted:
            return "a part for each replica, such as 3/1x2/0"
        if self.leveled:
            return "a number of modules for each level, such as 2x2 or 16x16"
        if self.share:
            return f"a number {'from' if not self.least else 'above'} 0 and up to {self.most:g}"
        choices = self.choices()
        return " or ".join(choices) if choices else f"a whole number of at least {self.least}"

    def word(self, value: Any) -> str:
        """The text of a value."""
        return f"{value:g}s" if self.duration else str(value)

    def value(self, text: str) -> Any:
        """The value of a text; None where it has none."""
        if self.duration:
            return _seconds(text)
        if self.numbered:
            found = numbers(text)
            return None if found is None else runs(found)
        if self.parted:
            parts = divided.read(text)
            return None if parts is None else divided.written(parts)
        if self.leveled:
            found = numbers_of_levels(text)
            return None if found is None else "x".join(map(str, found))
        if self.share:
            return _part(text, self.most, none=not self.least)
        choices = self.choices()
        if choices:
            return text if text in choices else None
        value = int(text) if text.isdecimal() and text.isascii() and len(text) <= 9 else -1
        return value if value >= self.least else None


def numbers(text: str) -> tuple[int, ...] | None:
    """The numbers of a text such as 0-5+9, in their order, () of "none"; None where it has another form."""
    if text == NONE:
        return ()
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?(\+\d{1,5}(-\d{1,5})?)*", text, re.ASCII):
        return None
    found: set[int] = set()
    for run in text.split("+"):
        first, _, last = run.partition("-")
        if last and int(last) < int(first):
            return None
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def numbers_of_levels(text: str) -> tuple[int, ...] | None:
    """The numbers of a text such as 2x2; None where it has another form."""
    if not re.fullmatch(r"\d{1,4}(x\d{1,4}){0,15}", text, re.ASCII):
        return None
    found = tuple(map(int, text.split("x")))
    return found if all(found) else None


def runs(some: Iterable[int]) -> str:
    """The text of a set of numbers, runs of neighbours joined: 0-5+9, or "none"."""
    ends: list[list[int]] = []
    for number in sorted(set(some)):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in ends) or NONE


def _seconds(text: str) -> float | None:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h)", text)
    value = float(found[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[found[2]] if found else 0.0
    return value if value > 0 else None


def _part(text: str, most: float, *, none: bool) -> float | None:
    try:
        value = float(text) if len(text) <= 20 and "_" not in text else -1.0
    except ValueError:
        return None
    return value if 0 < value <= most or (none and value == 0) else None


def read_options(name: str, options: Iterable[RuleOption], text: str) -> dict[str, Any]:
    """The values of the options that a text such as ``h=8,codec=bf16`` says of `name`.

    Raises:
        MeshwrightError: Y002 for every option that is unknown or has no such value.
    """
    known, found, wrong = {option.name: option for option in options}, {}, []
    for word in filter(None, text.split(",")):
        key, _, value = word.partition("=")
        if key not in known:
            help = f"{name} takes {', '.join(known)}" if known else f"{name} takes none"
            wrong.append(bad(f"{name} has no option {key!r}", help))
            continue
        found[key] = known[key].value(value)
        if found[key] is None:
            wrong.append(bad(f"{key}={value} is not {known[key].wanted}", known[key].what))
    if wrong:
        raise MeshwrightError(wrong)
    return found


def bad(message: str, help: str) -> Diagnostic:
    """The error of an option that is missing, unknown, or has no such value."""
    return Diagnostic(code="Y002", message=message, help=help)


def written(name: str, options: Iterable[RuleOption], values: Mapping[str, Any]) -> str:
    """The shortest text of a name with values for its options that reads back."""
    said = [f"{o.name}={o.word(values[o.name])}" for o in options if values[o.name] != o.default]
    return name + (":" + ",".join(said) if said else "")
