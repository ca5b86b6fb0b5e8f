"""The structure of a step: which task waits for which, whatever each of them has to do.

:func:`structure` is the list of its passes. Each takes the draft and adds to it; between passes the draft can be held
to the rules of :mod:`meshwright.lower.rules`. Structures are remembered, since many plans share one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec
import numpy as np

from meshwright import schedules
from meshwright.errors import MeshwrightError
from meshwright.graph import GraphBuilder, TaskGraph
from meshwright.lower.compute import Compute, add_compute
from meshwright.lower.exchange import Reduced, add_exchanges
from meshwright.lower.facts import Facts
from meshwright.lower.messages import ErrorsArrived, add_messages
from meshwright.lower.residency import Sizes, add_memory
from meshwright.lower.roles import Role, Roles
from meshwright.lower.rules import broken
from meshwright.lower.taught import add_lessons, add_public
from meshwright.lower.tiers import Tiered, add_tiers
from meshwright.lower.update import add_projected, add_update
from meshwright.schedules.actions import Actions

#: Structures remembered: a few dozen plans that differ in structure at a time.
REMEMBERED = 32


class Draft(msgspec.Struct):
    """A structure being made: each pass adds to the builder, and leaves what later passes read."""

    facts: Facts
    builder: GraphBuilder
    roles: Roles
    orders: list[Actions] = []
    computes: list[Compute] = []
    reduced: Reduced = Reduced()
    tiered: Tiered = Tiered()
    public: list[np.ndarray] = []
    lessons: list[np.ndarray] = []
    arrived: list[ErrorsArrived] = []
    sizes: Sizes = Sizes()


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """The graph of a step with roles for cost keys. ``codes`` number the bytes of its memory events among the entries
    of ``sizes``. ``actions`` are those of the first class of slices; others differ in the number of microbatches."""

    facts: Facts
    graph: TaskGraph
    roles: tuple[Role, ...]
    actions: Actions
    sizes: Sizes
    codes: np.ndarray


def schedule(draft: Draft) -> None:
    """The actions of the schedule, for every class of data-parallel slices."""
    facts, params = draft.facts, dict(draft.facts.params)
    for count in facts.counts:
        count *= facts.forwards or 1
        actions = schedules.build(facts.schedule, facts.pp, count * (1 + facts.adversarial), facts.vpp, **params)
        if facts.adversarial:  # what moves the next step's text, by weights that are not updated yet
            actions = actions.then(schedules.build(facts.schedule, facts.pp, count, facts.vpp).to_inputs())
        draft.orders.append(actions.forwards() if facts.frozen else actions.ahead(facts.ahead))


def public(draft: Draft) -> None:
    """The forward of public text, which replicas predict for their neighbours."""
    draft.public = add_public(draft.builder, draft.roles, draft.facts)


def compute(draft: Draft) -> None:
    """A task for every action, or one for each of its layers where exchanges run between them."""
    for index, actions in enumerate(draft.orders):
        draft.computes.append(add_compute(draft.builder, draft.roles, draft.facts, actions, index))


def messages(draft: Draft) -> None:
    """Activations and their gradients between stages, or the output's error to all of them."""
    for index, (actions, compute) in enumerate(zip(draft.orders, draft.computes)):
        found = add_messages(draft.builder, draft.roles, draft.facts, actions, compute, index)
        draft.arrived.append(found)


def lessons(draft: Draft) -> None:
    """Predictions of public text sent to neighbours, and learnt."""
    draft.lessons = add_lessons(draft.builder, draft.roles, draft.facts, draft.computes, draft.public)


def exchanges(draft: Draft) -> None:
    """Parameters and gradients between replicas."""
    draft.reduced = add_exchanges(draft.builder, draft.roles, draft.facts, draft.orders, draft.computes)


def tiers(draft: Draft) -> None:
    """State moved between device, host and drives."""
    draft.tiered = add_tiers(draft.builder, draft.roles, draft.facts, draft.orders, draft.computes, draft.reduced)


def update(draft: Draft) -> None:
    """The gradient norm, the optimizer, and parameters gathered after it."""
    if draft.facts.forwards:
        add_projected(draft.builder, draft.roles, draft.facts, draft.orders[0], draft.computes)
    elif not draft.facts.frozen:
        add_update(
            draft.builder, draft.roles, draft.facts, draft.orders[0], draft.computes, draft.reduced, draft.tiered
        )


def memory(draft: Draft) -> None:
    """Bytes that every task allocates and frees."""
    taught = draft.public, draft.lessons
    known = draft.facts, draft.orders, draft.computes, draft.reduced, draft.tiered, taught, draft.arrived
    draft.sizes = add_memory(draft.builder, *known)


#: The passes in their order; each is named as the function is.
PASSES: tuple[Callable[[Draft], None], ...] = (
    schedule,
    public,
    compute,
    messages,
    lessons,
    exchanges,
    tiers,
    update,
    memory,
)


def drafted(facts: Facts, until: str = "", *, check: bool = False) -> Draft:
    """Run the passes up to and with `until` (all of them), with the rules held after each if `check`.

    Raises:
        MeshwrightError: G002 when a pass broke the graph's rules.
    """
    ranks = len(facts.counts) * facts.pp
    draft = Draft(facts=facts, builder=GraphBuilder(tuple(map(str, range(ranks)))), roles=Roles())
    for one in PASSES:
        one(draft)
        if check and draft.computes:
            hold(draft.builder.build(), one.__name__, forward_only=facts.frozen)
        if one.__name__ == until:
            break
    return draft


def finished(draft: Draft) -> Structure:
    """The drafted graph in topological order.

    Raises:
        MeshwrightError: G001 when the schedule's order deadlocks, G002 when a pass broke the graph's rules.
    """
    graph = draft.builder.build()
    hold(graph, "the last of them", forward_only=draft.facts.frozen)
    memory = graph.memory
    return Structure(
        facts=draft.facts,
        graph=graph,
        roles=tuple(draft.roles.number),
        actions=draft.orders[0],
        sizes=draft.sizes,
        codes=np.abs(memory.num_bytes).astype(np.int64) - 1 if memory is not None else np.empty(0, np.int64),
    )


def hold(graph: TaskGraph, after: str, *, forward_only: bool = False) -> None:
    """Hold a graph to its rules.

    Raises:
        MeshwrightError: G002 when a pass broke them.
    """
    found = broken(graph, forward_only=forward_only)
    if found:
        raise MeshwrightError.one("G002", f"the graph breaks its own rules after pass {after}: " + "; ".join(found))


@lru_cache(maxsize=REMEMBERED)
def structure(facts: Facts) -> Structure:
    """The structure of every step with these facts.

    Raises:
        MeshwrightError: G001 when the schedule's order deadlocks, G002 when a pass broke the graph's rules.
    """
    return finished(drafted(facts))
