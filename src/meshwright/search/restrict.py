"""Restrictions as people write them: ``tp=8``, ``pp<=16``, ``schedule=1f1b,zb-h1``, ``stages=9,10,10,9``.

Fixing keeps the values said, excluding drops them, a bound keeps what is within it, allowing adds values that the
default space leaves out (another precision, balanced stages).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from meshwright import schedules
from meshwright.errors import Diagnostic, MeshwrightError, nearest
from meshwright.plan.facets import (
    ATTENTION_KERNELS,
    CP_ALGORITHMS,
    DEFAULT_ORDER,
    LOSS_KERNELS,
    OVERLAPS,
    RECOMPUTE_MODES,
)
from meshwright.plan.text import INTEGER_WORDS, VALUE_WORDS
from meshwright.plan.toml import rejected
from meshwright.search.space import BALANCED, EVEN, FACETS, Space
from meshwright.spec.workload import DTYPE_BYTES

_WORD = re.compile(r"\s*([a-z_]+)\s*(<=|>=|=)\s*(.+?)\s*", re.IGNORECASE)
_STORED = ("fp32", "bf16", "fp16", "fp8", "none")
#: Facets whose values are names.
NAMES: dict[str, tuple[str, ...]] = {
    "algorithm": CP_ALGORITHMS,
    "recompute": RECOMPUTE_MODES,
    "attention": ATTENTION_KERNELS,
    "loss": LOSS_KERNELS,
    "dtype": tuple(DTYPE_BYTES),
    "grads": _STORED[:-1],
    "master": _STORED,
    "moments": _STORED[:-1],
}
COUNTS = ("devices", "tp", "cp", "pp", "dp", "mb", "ep", "etp", "recompute_layers", "vpp", "zero", "shard")
#: Counts that may be 0: nothing sharded, or all of what there is.
FROM_NOTHING = ("etp", "recompute_layers", "zero", "shard")
#: Facets with an order, which a bound can be of.
ORDERED = (*COUNTS, "imbalance")
#: Where a plan has the facets that are numbers.
PLACES = INTEGER_WORDS | {facet: VALUE_WORDS[facet][:2] for facet in ("recompute_layers", "imbalance")}
#: Of a count as it is written.
MOST_DIGITS = 12
YES_NO = {"yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}


def restricted(
    space: Space,
    *,
    fix: Iterable[str] = (),
    bound: Iterable[str] = (),
    exclude: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> Space:
    """The space with every restriction applied: first what is allowed besides, then the others.

    Raises:
        MeshwrightError: R001 unknown facet, R002 unknown value, R003 a word that is no restriction; all at once. R005
            when nothing is left of a facet.
    """
    found: list[Diagnostic] = []
    for words, option, apply in (
        (allow, "--allow", _allowed),
        (fix, "--fix", _fixed),
        (bound, "--bound", _bounded),
        (exclude, "--exclude", _excluded),
    ):
        for word in words:
            try:
                space = _applied(space, word, option, apply)
            except MeshwrightError as error:
                found += error.diagnostics
    if found:
        raise MeshwrightError(found)
    for facet in FACETS:
        if space[facet] == ():
            help = "take back a --bound or an --exclude"
            raise MeshwrightError.one("R005", f"no value of {facet} is left", place=facet, help=help)
    return space


def _applied(space: Space, word: str, option: str, apply: Callable) -> Space:
    match, place = _WORD.fullmatch(word), f"{option} {word}"
    if not match or (match[2] != "=") != (option == "--bound"):
        form = "pp<=16" if option == "--bound" else "tp=8 or schedule=1f1b,zb-h1"
        raise MeshwrightError.one("R003", f"{word!r} is not a restriction", place=place, help=f"write {option} {form}")
    facet = match[1].lower()
    if facet not in FACETS:
        raise MeshwrightError.one("R001", f"no facet {facet!r}", place=place, help=nearest(facet, list(FACETS)))
    if option == "--bound" and (facet not in ORDERED or "," in match[3]):
        raise MeshwrightError.one(
            "R003",
            f"{word!r} is not a bound: it is one number, of a facet whose values are numbers",
            place=place,
            help=f"bounds are of {', '.join(ORDERED)}; of others say --fix or --exclude {facet}=",
        )
    return apply(space, facet, match[2], _values(facet, match[3], place))


def _fixed(space: Space, facet: str, _: str, values: tuple) -> Space:
    return space.with_domain(facet, values)


def _allowed(space: Space, facet: str, _: str, values: tuple) -> Space:
    before = space[facet]
    return space.with_domain(facet, values if before is None else tuple(dict.fromkeys((*before, *values))))


def _excluded(space: Space, facet: str, _: str, values: tuple) -> Space:
    before = _listed(space, facet)
    return space.with_domain(facet, tuple(v for v in before if v not in values))


def _bounded(space: Space, facet: str, sign: str, values: tuple) -> Space:
    limit = values[0]
    inside = (lambda v: v <= limit) if sign == "<=" else (lambda v: v >= limit)
    return space.with_domain(facet, tuple(v for v in _listed(space, facet) if inside(v)))


def _listed(space: Space, facet: str) -> tuple:
    """The values of a facet that is otherwise worked out: all it could be."""
    domain = space[facet]
    if domain is not None:
        return domain
    most = max(space["devices"])
    if facet == "vpp":
        return tuple(range(1, 129))
    return tuple(n for n in range(0 if facet == "shard" else 1, most + 1) if n == 0 or most % n == 0)


def _values(facet: str, text: str, place: str) -> tuple[Any, ...]:
    if facet in ("stages", "shares") and text not in (EVEN, BALANCED):
        return (tuple(_number(facet, part, place) for part in text.split(",")),)
    return tuple(_value(facet, part.strip().lower(), place) for part in text.split(","))


def _value(facet: str, text: str, place: str) -> Any:
    if facet in COUNTS:
        return _number(facet, text, place)
    if facet == "schedule":
        try:
            return schedules.get(text).name
        except MeshwrightError as error:
            raise _unknown(facet, text, place, error.diagnostics[0].help) from None
    if facet == "sp":
        return _choice(facet, text, YES_NO, place)
    if facet == "order":
        order = tuple(text.split("-"))
        if sorted(order) != sorted(DEFAULT_ORDER):
            raise _unknown(facet, text, place, "an order of tp, cp, dp, pp such as tp-cp-dp-pp")
        return order
    if facet == "overlap":
        names = tuple(sorted(text.split("+"))) if text != "none" else ()
        return tuple(_choice(facet, name, {n: n for n in OVERLAPS}, place) for name in names)
    if facet == "imbalance":
        try:
            return _checked(facet, float(text), text, place)
        except ValueError:
            raise _unknown(facet, text, place, "a ratio such as 1.2") from None
    if facet in ("stages", "shares"):
        return text
    return _choice(facet, text, {n: n for n in NAMES[facet]}, place)


def _choice(facet: str, text: str, known: dict[str, Any], place: str) -> Any:
    if text not in known:
        raise _unknown(facet, text, place, nearest(text, list(known)))
    return known[text]


def _number(facet: str, text: str, place: str) -> int:
    if not text.strip().isdecimal() or len(text) > MOST_DIGITS:
        raise _unknown(facet, text, place, f"{facet} takes whole numbers, such as {facet}=4 or {facet}=2,4,8")
    number = int(text)
    if number < 1 and facet not in FROM_NOTHING:
        raise _unknown(facet, text, place, f"{facet} is at least 1")
    return _checked(facet, number, text, place)


def _checked(facet: str, value: Any, text: str, place: str) -> Any:
    """The value, if a plan can say it."""
    where = PLACES.get(facet)
    reason = rejected(*where, value) if where else ""
    if reason:
        raise _unknown(facet, text, place, reason)
    return value


def _unknown(facet: str, text: str, place: str, help: str) -> MeshwrightError:
    return MeshwrightError.one("R002", f"{facet} has no value {text!r}", place=place, help=help)
