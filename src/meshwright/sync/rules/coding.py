"""Gradient coding: clients compute parts of a batch several times over, and a server has the whole gradient from those
who answer (Tandon et al. 1612.03301; repeated tasks: Krishnan et al. 2211.13802)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import Diagnostic
from meshwright.sync.clients.coded import Coded
from meshwright.sync.options import RuleOption
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.clients import choices, fragments
from meshwright.sync.rules.clients import wrong as unserved

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts whose replicas are no clients, and codes that make up for all of them."""
    yield from unserved(plan, cluster, policy)
    if policy["s"] >= plan.layout.dp > 1:
        yield Diagnostic(
            code="Y003",
            message=f"a code for {policy['s']} missing of {plan.layout.dp} clients",
            place=f"plan.sync.policy = {policy.text}",
            help=f"say s={plan.layout.dp - 1} at most",
        )


CODING = SyncRule(
    name="coded",
    title="parts of a batch computed by several clients each, and their sum from those who answer",
    paper="Tandon et al., 2016, arXiv 1612.03301",
    exact=False,  # sums are taken in another order
    optimizer="sgd",
    choices=lambda values: choices(values) | {"codec": "none"},
    fragments=fragments,
    together=lambda plan: 1,
    options=(
        RuleOption(name="s", what="clients that may be missing from a step, each part's copies less one", example=1),
    ),
    wrong=wrong,
    decider=lambda values, count: Coded(num_clients=count, extra=values["s"]),
    copies=lambda values: values["s"] + 1,
)

RULES = (CODING,)
