"""Decentralised ADMM: replicas minimise their own losses, at prices of differing from the few that they meet.

The losses f_i of all are minimised so that the parameters x_i of neighbours on a graph are equal. In a round each
replica goes towards ``argmin f_i(x) + p_i x + rho sum_j |x - (x_i + x_j) / 2|^2`` by ``h`` steps of its own, each of
them proximal in the penalty: a step of the workload's optimizer along the gradient of f_i plus the dual p_i, then the
pull to the middle that minimises penalty and distance to that step together. Neighbours exchange parameters, and duals
gather how they differ, ``p_i += rho sum_j (x_i - x_j)`` (Shi et al. 1307.5561; with one step a round the linearised
method, Ling et al. 2015). Duals of all sum to nothing, so that where replicas agree the gradient of all is nothing.

With ``noise=1`` the middle is moved by normal numbers of deviation sqrt(2) / (2 rho), anew in every round: the iterates
are samples of the density exp(-sum of losses) (D-ADMMS, Tzikas et al. 2401.15838). A loss that is a mean over as many
tokens as there are of a replica is sampled as their sum by ``noise`` of one over that number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync import groups
from meshwright.sync.fragments import EVERY, PARAMETERS, Fragment, Stored, Weights
from meshwright.sync.options import RuleOption, written
from meshwright.sync.record import GRAPH, Mix
from meshwright.sync.rules import SyncRule, local

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of ADMM: parameters to neighbours, who keep prices of differing from them."""
    met = written(values[GRAPH], groups.graphs()[values[GRAPH]].options, values)
    return {
        "when": values["h"],
        "fragments": (PARAMETERS,),
        "combine": "mean",
        "mix": Mix(graph=met, rho=values["rho"], noise=values["noise"]),
    }


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """The parameters of local steps, sent to neighbours as they are."""
    for one in local.fragments(plan, policy, weights, stored):
        yield msgspec.structs.replace(one, mix=policy.mix) if one.due == EVERY else one


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Plans that local steps cannot keep together, and graphs whose edges do not go both ways, always the same."""
    yield from local.wrong(plan, cluster, policy)
    yield from local.unmet(plan, policy, groups.pairless, "keep no prices of differing")


ADMM = SyncRule(
    name="admm",
    title="duals between neighbours",
    paper="Tzikas et al., 2024, arXiv 2401.15838",
    exact=False,
    options=(
        RuleOption(name="h", what="local steps between two exchanges", default=1),
        RuleOption(name=GRAPH, what="who meets whom", default=groups.RING.name, choices=lambda: tuple(groups.graphs())),
        RuleOption(name="rho", what="the penalty of differing from a neighbour", example=0.1, share=True, most=1e6),
        RuleOption(
            name="noise",
            what="what is added to the middle between neighbours, as a part of what samples exp(-sum of losses)",
            default=0.0,
            least=0,
            share=True,
            most=1e3,
        ),
    ),
    choices=choices,
    fragments=fragments,
    together=local.together,
    wrong=wrong,
)

RULES = (ADMM,)
