"""Clients of which some anchor the direction that others take (FedAMD, Wu et al. 2206.05891)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.errors import Diagnostic
from meshwright.sync.clients.anchors import Anchors
from meshwright.sync.options import RuleOption
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.clients import SAMPLE, STEPS, choices, fragments
from meshwright.sync.rules.clients import wrong as unserved

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts whose replicas are no clients, and periods in which nobody mines."""
    yield from unserved(plan, cluster, policy)
    if policy["period"] == 1:
        yield Diagnostic(
            code="Y003",
            message="with period=1 all clients are anchors in every round, and nobody takes a step",
            place=f"plan.sync.policy = {policy.text}",
            help="say period=2 or more, or 0 for anchors by chance",
        )


def decider(values: dict[str, Any], count: int) -> Anchors:
    """The decider of so many clients."""
    return Anchors(
        num_clients=count,
        sample=min(values["clients"] or count, count),
        steps=values["h"],
        large=values["large"],
        share=values["anchors"],
        period=values["period"],
        rate=values["rate"],
    )


FEDAMD = SyncRule(
    name="fedamd",
    title="anchors with large batches, and steps that their gradients correct",
    paper="Wu et al., 2022, arXiv 2206.05891",
    exact=False,
    optimizer="sgd",
    choices=choices,
    fragments=fragments,
    together=lambda plan: 1,
    options=(
        STEPS,
        SAMPLE,
        RuleOption(name="large", what="how many times larger an anchor's batch is", default=8),
        RuleOption(
            name="anchors", what="the chance of a client of a sample to be an anchor", default=0.2, share=True, most=0.9
        ),
        RuleOption(
            name="period",
            what="rounds in one of which all of a sample are anchors; 0 for by chance",
            default=0,
            least=0,
        ),
        RuleOption(name="rate", what="the server's step along the mean change", default=1.0, share=True, most=10.0),
    ),
    wrong=wrong,
    decider=decider,
    passes=True,
)

RULES = (FEDAMD,)
