"""Schedules: pure functions from (ranks, microbatches, chunks) to what each rank does, in order.

One file per schedule of the literature; each registers a `Family`. Bubble and peak memory are outputs of
timing a schedule, never claims about it. ``2bp:NAME`` is any schedule with its backward split and its weight
gradients deferred.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError, nearest

if TYPE_CHECKING:
    from meshwright.schedules.actions import Actions
    from meshwright.schedules.family import Family

MODULES = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "breadth_first",
    "zb_h",
    "zb_v",
    "dualpipe",
    "hanayo",
    "two_way",
    "zeropp",
    "zb_auto",
)
"""The files of this package that define schedules, each as ``FAMILIES``: a new schedule is a file and its name here."""

TWO_BP = "2bp:"


@cache
def families() -> dict[str, Family]:
    """Every schedule by its name (aliases are known to `get`)."""
    found = [import_module(f"meshwright.schedules.{module}").FAMILIES for module in MODULES]
    return {family.name: family for group in found for family in group}


@cache
def _by_any_name() -> dict[str, Family]:
    return {word: family for family in families().values() for word in (family.name, *family.aliases)}


def get(name: str) -> Family:
    """The family called `name` (or by an alias, or ``2bp:`` before either).

    Raises:
        MeshwrightError: S001 when no schedule has the name; names the nearest.
    """
    known = _by_any_name()
    plain = name.lower().replace("_", "-")
    if plain.startswith(TWO_BP):
        from meshwright.schedules.two_bp import family_over

        return family_over(get(plain.removeprefix(TWO_BP)))
    if plain not in known:
        raise MeshwrightError.one(
            "S001", f"no schedule is called {name!r}", place=f"schedule.name = {name}", help=nearest(plain, list(known))
        )
    return known[plain]


def build(name: str, num_ranks: int, num_microbatches: int, vpp: int | None = None, **params: Any) -> Actions:
    """The actions of one schedule. `vpp` is stages per rank (None: the family's own); `params` are the family's.

    Raises:
        MeshwrightError: S001 for an unknown name; else every violation that `Family.legality` finds.
    """
    hashable = {key: value if isinstance(value, Hashable) else tuple(value) for key, value in params.items()}
    return _build(name, num_ranks, num_microbatches, vpp, **hashable)


@lru_cache(maxsize=256)
def _build(name: str, num_ranks: int, num_microbatches: int, vpp: int | None, **params: Any) -> Actions:
    family = get(name)
    found = family.legality(num_ranks, num_microbatches, vpp, **params)
    if found:
        raise MeshwrightError(found)
    return family.order(family.shape(num_ranks, num_microbatches, vpp, **params))
