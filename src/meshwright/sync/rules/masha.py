"""MASHA: extragradient steps whose replicas send how their gradients differ from those at a reference point (Beznosikov
et al. 2110.03313).

A step goes from between the parameters and the reference, along the reference's gradient, to a point half-way, whose
gradient is that of the step. All know the sum of gradients at the reference: each replica sends what is different
half-way, in a codec, which loses the less the nearer both points are. Now and then, by chance, the reference moves to
the parameters, and its gradient is exchanged whole: a second pass over the batch of that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.codecs import codec, codecs
from meshwright.sync.fragments import GRADIENTS, REFERENCE, Fragment, Stored, Weights, gathered, gradients
from meshwright.sync.options import RuleOption
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.step import unexchanged

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Differences of gradients to the sums, and what is sharded gathered for the passes."""
    if weights.trained:
        summed = gradients(plan, weights, stored)
        yield msgspec.structs.replace(summed, codec=policy.codec, update=REFERENCE)
    if plan.layout.zero:
        yield gathered(plan, weights, stored)


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts in which gradients cannot be exchanged encoded, and codecs that go by gradients themselves."""
    yield from unexchanged(plan, cluster, policy)
    code = codec(policy.codec)
    if code.adapts or code.correction:
        does = "chooses ranks by gradients" if code.adapts else "gathers gradients with momentum"
        yield Diagnostic(
            code="Y003",
            message=f"{policy.values['codec']} {does}, and replicas send differences to a reference",
            place=f"plan.sync.policy = {policy.text}",
            help="take codec=powersgd or codec=topk",
        )


MASHA = SyncRule(
    name="masha",
    title="extragradient steps by differences to a reference point",
    paper="Beznosikov et al., 2021, arXiv 2110.03313",
    exact=False,
    optimizer="sgd",
    choices=lambda values: {
        "fragments": (GRADIENTS,),
        "codec": values["codec"],
        "combine": "sum",
        "reference": values["h"],
    },
    fragments=fragments,
    options=(
        RuleOption(name="h", what="steps after which the reference moves, in the mean", example=10),
        RuleOption(
            name="codec",
            what="the code of differences to the reference",
            example="randomk,share=0.1,feedback=no",
            choices=lambda: tuple(codecs()),
        ),
    ),
    together=lambda plan: plan.layout.dp * plan.layout.cp,
    wrong=wrong,
)

RULES = (MASHA,)
