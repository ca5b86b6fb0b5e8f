"""DADAO: gradient steps and pairwise meetings by clocks of their own, with momenta that mix between them (Nabli and
Oyallon 2208.00779).

Each replica takes gradient steps of its own and meets one neighbour at a time, when their edge of a graph ticks
(``sync/clocks.py``); a meeting is two messages, and whoever is not in it goes on. Momenta of the parameters, of the
gradient and of agreement mix in between by how much time has passed, which accelerates both the descent and the
agreement. The learning rate is that of plain SGD.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync import groups
from meshwright.sync.clocks import Clocks
from meshwright.sync.fragments import EVERY, PARAMETERS, Fragment, Stored, Weights
from meshwright.sync.options import RuleOption, written
from meshwright.sync.record import GRAPH, Mix
from meshwright.sync.rules import SyncRule, local

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of DADAO: duals of parameters between two replicas, when clocks say so."""
    met = written(values[GRAPH], groups.graphs()[values[GRAPH]].options, values)
    said = {"condition": values["condition"], "meetings": values["meetings"], "seed": values["clock"]}
    return {"fragments": (PARAMETERS,), "combine": "mean", "clocks": Clocks(graph=met, **said)}


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """As many values as local steps average, sent from one replica to another and back."""
    mix = Mix(graph=policy.group, clocks=policy.clocks)
    for one in local.fragments(plan, policy, weights, stored):
        yield msgspec.structs.replace(one, mix=mix) if one.due == EVERY else one


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Plans that local steps cannot keep together, and graphs whose edges do not go both ways, always the same."""
    yield from local.wrong(plan, cluster, policy)
    yield from local.unmet(plan, policy, groups.pairless, "have no edges that tick")


DADAO = SyncRule(
    name="dadao",
    title="meetings by clocks",
    paper="Nabli and Oyallon, 2022, arXiv 2208.00779",
    exact=False,
    optimizer="sgd",
    options=(
        RuleOption(name=GRAPH, what="who meets whom", default=groups.RING.name, choices=lambda: tuple(groups.graphs())),
        RuleOption(
            name="condition",
            what="how many times as steep as it is flat the loss is taken to be",
            default=100.0,
            share=True,
            most=1e9,
        ),
        RuleOption(
            name="meetings",
            what="meetings of a replica for each gradient step, in the mean; 0: as many as the graph asks for",
            default=0.0,
            least=0,
            share=True,
            most=1e3,
        ),
        RuleOption(name="clock", what="the seed that clocks are drawn by", default=1, least=0),
    ),
    choices=choices,
    fragments=fragments,
    together=local.together,
    wrong=wrong,
)

RULES = (DADAO,)
