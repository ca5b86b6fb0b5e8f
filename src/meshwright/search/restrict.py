"""Restrictions as people write them: ``tp=8``, ``pp<=16``, ``schedule=1f1b,zb-h1``, ``stages=9,10,10,9``.

Fixing keeps the values said, excluding drops them, a bound keeps what is within it, allowing adds values that the
default space leaves out (another precision, balanced stages).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.plan.facet import Form, count
from meshwright.plan.facets import fields
from meshwright.plan.facets.feedback import CHAIN
from meshwright.plan.facets.overlap import AS_DECIDED
from meshwright.search.space import DEVICES, FACETS, Space

_WORD = re.compile(r"\s*([a-z_]+)\s*(<=|>=|=)\s*(.+?)\s*", re.IGNORECASE)


def fed(space: Space) -> Space:
    """Return the space without what does not go with its way of feedback.

    Raises:
        MeshwrightError: R002 for several ways, which are different models of what layers learn.
    """
    ways = {*(space["feedback"] or ())}
    if ways <= {CHAIN}:
        return space
    if len(ways) > 1:
        message = f"a search lays plans beside each other that learn alike, and {', '.join(sorted(ways))} do not"
        raise MeshwrightError.one("R002", message, place="--allow feedback", help="say one of them: --fix feedback=dfa")
    return space.with_domain("zero", tuple(zero for zero in space["zero"] or (0, 1) if zero < 2))


def restricted(
    space: Space,
    *,
    fix: Iterable[str] = (),
    bound: Iterable[str] = (),
    exclude: Iterable[str] = (),
    allow: Iterable[str] = (),
    forms: Mapping[str, Form] | None = None,
) -> Space:
    """The space with every restriction applied: first what is allowed besides, then the others. `forms` says which
    facets there are and how their values are written, those of training plans unless said.

    Raises:
        MeshwrightError: R001 unknown facet, R002 unknown value, R003 a word that is no restriction; all at once. R005
            when nothing is left of a facet.
    """
    forms = forms or training_forms()
    found: list[Diagnostic] = []
    for words, option, apply in (
        (allow, "--allow", _allowed),
        (fix, "--fix", _fixed),
        (bound, "--bound", _bounded),
        (exclude, "--exclude", _excluded),
    ):
        for word in words:
            try:
                space = _applied(space, word, option, apply, forms)
            except MeshwrightError as error:
                found += error.diagnostics
    if found:
        raise MeshwrightError(found)
    for facet in forms:
        if space[facet] == ():
            help = "take back a --bound or an --exclude"
            raise MeshwrightError.one("R005", f"no value of {facet} is left", place=facet, help=help)
    return space


def training_forms() -> dict[str, Form]:
    """Return how the values of every facet of training plans are written."""
    return {name: count() if name == DEVICES else fields()[name].form for name in FACETS}


def _applied(space: Space, word: str, option: str, apply: Callable, forms: Mapping[str, Form]) -> Space:
    match, place = _WORD.fullmatch(word), f"{option} {word}"
    if not match or (match[2] != "=") != (option == "--bound"):
        shape = "pp<=16" if option == "--bound" else "tp=8 or schedule=1f1b,zb-h1"
        raise MeshwrightError.one("R003", f"{word!r} is not a restriction", place=place, help=f"write {option} {shape}")
    facet = match[1].lower()
    if facet not in forms:
        raise MeshwrightError.one("R001", f"no facet {facet!r}", place=place, help=nearest(facet, list(forms)))
    if option == "--bound" and (not forms[facet].ordered or "," in match[3]):
        ordered = ", ".join(name for name, form in forms.items() if form.ordered)
        raise MeshwrightError.one(
            "R003",
            f"{word!r} is not a bound: it is one number, of a facet whose values are numbers",
            place=place,
            help=f"bounds are of {ordered}; of others say --fix or --exclude {facet}=",
        )
    return apply(space, facet, match[2], _values(facet, match[3], place, forms[facet]))


def _fixed(space: Space, facet: str, _: str, values: tuple) -> Space:
    return space.with_domain(facet, values)


def _allowed(space: Space, facet: str, _: str, values: tuple) -> Space:
    before = space[facet]
    return space.with_domain(facet, values if before is None else tuple(dict.fromkeys((*before, *values))))


def _excluded(space: Space, facet: str, _: str, values: tuple) -> Space:
    before = _listed(space, facet)
    return space.with_domain(facet, tuple(v for v in before if _said(v) not in values))


def _said(value: Any) -> Any:
    """A value without the mark that the schedule decides it."""
    return value[:-1] if isinstance(value, tuple) and value[-1:] == (AS_DECIDED,) else value


def _bounded(space: Space, facet: str, sign: str, values: tuple) -> Space:
    limit = values[0]
    inside = (lambda v: v <= limit) if sign == "<=" else (lambda v: v >= limit)
    return space.with_domain(facet, tuple(v for v in _listed(space, facet) if inside(v)))


def _listed(space: Space, facet: str) -> tuple:
    """The values of a facet that is otherwise worked out: all it could be."""
    domain = space[facet]
    if domain is not None:
        return domain
    most = max(space[DEVICES])
    if facet == "vpp":
        return tuple(range(1, 129))
    least = 0 if fields()[facet].form.read("0") == 0 else 1
    return tuple(n for n in range(least, most + 1) if n == 0 or most % n == 0)


def _values(facet: str, text: str, place: str, form: Form) -> tuple[Any, ...]:
    """The values that a restriction lists: commas lie between them, so that those inside one are written ``+``."""
    search = fields()[facet].search if facet in fields() else ()
    if text in search:
        return (text,)
    parts = [text] if form.whole else text.split(",")
    return tuple(_value(facet, form, part.strip().lower().replace("+", ","), place) for part in parts)


def _value(facet: str, form: Form, text: str, place: str) -> Any:
    try:
        value = form.read(text)
    except MeshwrightError as error:
        raise _unknown(facet, text, place, error.diagnostics[0].help) from None
    if value is None:
        help = nearest(text, form.names) if form.names else f"{facet} is {form.wanted}"
        raise _unknown(facet, text, place, help)
    return value


def _unknown(facet: str, text: str, place: str, help: str) -> MeshwrightError:
    other = re.search(r"[\s,]?([a-z_]+)=", text)
    if other is not None and other[1] in FACETS:
        option = place.partition(" ")[0]
        help = f"one facet each: {option} {facet}=... {option} {text[other.start(1) :]}"
    return MeshwrightError.one("R002", f"{facet} has no value {text!r}", place=place, help=help)
