"""Engines: who could run a plan, and what of a space none of them runs.

What an engine refuses is a function of a whole plan (:func:`meshwright.export.engines.refusals`), asked of every plan
before it is evaluated. Most refusals follow from the sizes and one facet alone (Megatron-LM has no zb-h1, whatever
else a plan says), so those values leave the space core by core, before anything is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import msgspec

from meshwright import schedules
from meshwright.plan import Plan
from meshwright.plan.facets import fields
from meshwright.search.space import EVEN, FACETS, PLAIN, Core, Inner, Piped, Space, State, plan_of

#: Facets whose refusals follow from the sizes and the facet's own value.
ALONE = ("order", "sp", "algorithm", "recompute", "attention", "loss", "schedule", "zero")
#: What a refusal names where the sizes are what is refused.
SIZES = ("layout.tp", "layout.pp", "layout.dp", "layout.cp", "experts.ep", "experts.etp")
#: What is said of plans that nobody asked for runs.
CANNOT = "{} cannot run it: {}"


class Refusal(Protocol):
    """One thing an engine cannot run: the facet, its value as it would be said, and the reason."""

    facet: str
    value: str
    reason: str


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that runs plans: what it ``refuses`` of a legal plan, and ``needs``: values besides those of the
    default space that some of its plans have to say (facet -> values). ``own``: this package's executor, which is named
    and not preferred where nobody asks for it."""

    name: str
    label: str
    refuses: Callable[[Plan], Sequence[Refusal]]
    needs: dict[str, tuple[Any, ...]] = {}
    own: bool = False


class Demands(msgspec.Struct, frozen=True, kw_only=True):
    """Demands on plans besides fitting in memory: leave ``room_bytes`` on the fullest rank, and be run by one of the
    ``engines`` if there are any. ``others`` are the engines that a recommended plan had better be run by where none is
    asked for. ``usual_room_bytes``, where no other room is demanded, is left by every plan if any plan leaves it: so
    much keeps the usual chance of running out of memory."""

    room_bytes: float = 0.0
    usual_room_bytes: float = 0.0
    engines: tuple[Engine, ...] = ()
    others: tuple[Engine, ...] = ()


class Runnable:
    """Check of plans against several ``engines``: which of them run a plan, and why none does."""

    def __init__(self, engines: Iterable[Engine]):
        self.engines = tuple(engines)
        self.label = " or ".join(engine.label for engine in self.engines)

    def runs(self, plan: Plan) -> tuple[Engine, ...]:
        """The engines that run all of a plan."""
        return tuple(engine for engine in self.engines if not engine.refuses(plan))

    def why_not(self, plan: Plan) -> str:
        """Why no engine runs a plan, in words to count it under; "" when one does. The facets are those that stand
        in the way of the engine that refuses least."""
        found = []
        for engine in self.engines:
            refused = engine.refuses(plan)
            if not refused:
                return ""
            found.append(list(dict.fromkeys(r.facet.partition(".")[2] or r.facet for r in refused)))
        return CANNOT.format(self.label, ", ".join(min(found, key=len)))

    def reasons(self, plan: Plan) -> list[str]:
        """Return the reason for every refusal of a plan, engine by engine, in words; empty when all engines run it."""
        refused = ((engine.label, r) for engine in self.engines for r in engine.refuses(plan))
        return [f"{label} cannot run {r.value}: {r.reason}" for label, r in refused]

    def narrowed(self, space: Space, core: Core) -> list[Space]:
        """For each engine the space without the values that it runs with no plan of `core`; without repetitions, and
        without engines that run none."""
        found = []
        for engine in self.engines:
            mine = _narrowed(engine, space, core)
            if mine is not None and mine not in found:
                found.append(mine)
        return found


def of_question(refusal: Refusal) -> bool:
    """Whether it is the model, the cluster or the workload that an engine refuses, and no facet of a plan."""
    return refusal.facet.partition(".")[0] not in Plan.__struct_fields__


def extended(space: Space, engines: Iterable[Engine]) -> Space:
    """Return the space with the values that some plans of the engines have to have."""
    for facet, values in chain.from_iterable(engine.needs.items() for engine in engines):
        before = space[facet] or ()
        space = space.with_domain(facet, tuple(dict.fromkeys((*before, *values))))
    return space


def impossible(engine: Engine, plans: Iterable[Plan]) -> list[Refusal]:
    """Return an engine's refusals that hold whatever the plan: of no plan facet, and the same for each of `plans`."""
    each = [[r for r in engine.refuses(plan) if of_question(r)] for plan in plans]
    always = set.intersection(*({(r.facet, r.value, r.reason) for r in found} for found in each)) if each else set()
    return [r for r in each[0] if (r.facet, r.value, r.reason) in always] if each else []


def _narrowed(engine: Engine, space: Space, core: Core) -> Space | None:
    """The space without what an engine refuses because of one facet beside the sizes; None when it refuses them."""
    first = {facet: values[0] for facet in FACETS if (values := space[facet])}
    usual = {"overlap": _overlaps(space, core)[0], "shares": EVEN}
    inner = Inner(**{f: usual.get(f, first[f]) for f in Inner._fields})
    refused: dict[tuple[str, Any], list[Refusal]] = {}

    def ask(facet: str, value: Any, inner: Inner = inner, piped: Piped = PLAIN, zero: int = 0) -> None:
        refused[facet, value] = list(engine.refuses(plan_of(core, inner, piped, State(zero=zero))))

    for zero in space["zero"]:
        ask("zero", zero, zero=zero)
    asked = [{r.facet for r in refused["zero", zero] if r.facet in SIZES or of_question(r)} for zero in space["zero"]]
    if set.intersection(*asked):
        return None
    for facet in ALONE:
        if facet in Inner._fields:
            for value in space[facet]:
                ask(facet, value, inner=inner._replace(**{facet: value}))
    if core.pp > 1:
        for name in space["schedule"]:
            ask("schedule", name, piped=Piped(schedule=name, vpp=(schedules.get(name).vpps or (1,))[0]))
    for facet in ALONE:
        place = f"{fields()[facet].facet}.{fields()[facet].attribute}"
        values = tuple(v for v in space[facet] if all(r.facet != place for r in refused.get((facet, v), ())))
        if not values:
            return None
        space = space.with_domain(facet, values)
    return space.with_domain("overlap", _overlaps(space, core))


def _overlaps(space: Space, core: Core) -> tuple[tuple[str, ...], ...]:
    """The overlaps that differ where axes of one rank have nothing to hide: of several the first."""
    hides = {"pp": core.pp > 1, "dp": core.dp * core.cp > 1, "tp": core.tp > 1}
    found: dict[frozenset[str], tuple[str, ...]] = {}
    for overlap in space["overlap"]:
        found.setdefault(frozenset(name for name in overlap if hides.get(name.partition(":")[0], True)), overlap)
    return tuple(found.values())
