"""The facets of a plan, one file each, and the table of them that everything walks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.plan.facet import Facet, Field
    from meshwright.plan.record import Plan

MODULES = [
    "meshwright.plan.facets.layout",
    "meshwright.plan.facets.pipeline",
    "meshwright.plan.facets.kinds",
    "meshwright.plan.facets.sequence",
    "meshwright.plan.facets.experts",
    "meshwright.plan.facets.memory",
    "meshwright.plan.facets.offload",
    "meshwright.plan.facets.precision",
    "meshwright.plan.facets.kernels",
    "meshwright.plan.facets.overlap",
    "meshwright.plan.facets.sync",
    "meshwright.plan.facets.passes",
    "meshwright.plan.facets.feedback",
    "meshwright.plan.facets.serving",
    "meshwright.plan.facets.denoising",
    "meshwright.plan.facets.embeddings",
    "meshwright.plan.facets.buckets",
    "meshwright.plan.facets.vertices",
]
"""The files that define a facet, each as ``FACET``: a new facet is a file and its name here."""


@cache
def facets() -> dict[str, Facet]:
    """Every facet by its name, which is that of a plan's attribute."""
    found = (import_module(module).FACET.complete() for module in MODULES)
    return {facet.name: facet for facet in found}


@cache
def fields() -> dict[str, Field]:
    """Every field of all facets by its name."""
    return {field.name: field for facet in facets().values() for field in facet.fields}


@cache
def decided(what: str, *, but: tuple[str, ...] = ()) -> Callable[[Plan], tuple]:
    """The function from a plan to all that decides `what` in it (``STRUCTURE``, ``LAYER``, ...), outside the facets
    `but`: plans that agree on it share what was worked out from it."""
    chosen = [field for field in fields().values() if what in field.decides and field.facet not in but]
    whole = [f"{f.facet}.{name}" for f in chosen if what not in f.seen for name in f.attributes]
    values = attrgetter(*whole) if whole else lambda plan: ()
    seen = [field.seen[what] for field in chosen if what in field.seen]

    def key(plan: Plan) -> tuple[Any, ...]:
        return values(plan), *[look(plan) for look in seen]

    return key
