"""Local steps: replicas take their own optimizer steps, and average their parameters every ``h`` of them (local SGD,
Stich 1805.09767; with any optimizer, Lin et al. 1808.07217). The moments of the optimizer stay each replica's own, or
are averaged too.

With a code, the change since the last average travels instead of the parameters, as in FedPAQ (Reisizadeh et al.
1909.13014). With a sharding scope (``hsdp4``, ``zero1 shard4``, ``shard4``) the ranks inside it step together in every
step, and parameters are averaged between the scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.codecs import codec, codecs
from meshwright.sync.combines import combine, ways
from meshwright.sync.fragments import (
    EVERY,
    MOMENTS,
    PARAMETERS,
    SELF,
    Among,
    Fragment,
    Stored,
    Weights,
    gathered,
    gradients,
)
from meshwright.sync.options import RuleOption
from meshwright.sync.record import GRAPH
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.step import uncombined

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy

OWN, MEAN = "own", "mean"


def together(plan: Plan) -> int:
    """Data-parallel ranks of one replica: those of a sharding scope, else those that share its sequences."""
    return plan.layout.shard or plan.layout.cp


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Gradients summed inside a replica, and parameters averaged between replicas once in ``h`` steps."""
    if plan.layout.zero:
        yield gathered(plan, weights, stored)
    if not weights.trained:
        return
    summed = gradients(plan, weights, stored)
    inside = SELF if plan.layout.zero else Among("shard" if plan.layout.shard else "cp", together(plan))
    yield msgspec.structs.replace(summed, replica=inside)
    mean = Fragment(
        what=PARAMETERS,
        units=weights[:2],
        kind=weights.kind,
        num_elements=weights.trained,
        element_bytes=stored.masters,
        shard=summed.shard,
        replica=Among(*between(plan)),
        due=EVERY,
        every=policy.spacing,
        lag=policy.delay,
        outer=policy.outer if policy.delay or not policy.outer.taken else None,
        codec=policy.codec,
        combine=policy.combine,
        apply="parameters",
        beside=policy.early,
        tensors=summed.tensors,
    )
    yield mean
    if MOMENTS in policy.fragments and stored.num_moments:
        count = weights.trained * stored.num_moments
        yield msgspec.structs.replace(
            mean,
            what=MOMENTS,
            num_elements=count,
            element_bytes=stored.moments,
            codec="none",
            apply="optimizer",
            tensors=(),
        )


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of local steps: parameters to their mean, once in ``h`` steps."""
    averaged = (PARAMETERS, MOMENTS) if values["moments"] == MEAN else (PARAMETERS,)
    return {"when": values["h"], "fragments": averaged, "codec": values["codec"]}


def between(plan: Plan) -> tuple[str, int]:
    """The group of replicas that average, and how many they are."""
    layout = plan.layout
    return "replica" if layout.shard else "dp", layout.dp * layout.cp // together(plan)


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts without replicas of their own, or whose replicas exchange something in every step."""
    layout, replicas = plan.layout, plan.layout.dp * plan.layout.cp // together(plan)
    if layout.zero and not layout.shard:
        yield _bad(
            policy.rule,
            f"zero{layout.zero} shards over all dp*cp = {layout.dp * layout.cp} ranks, and none has a copy of its own",
            f"layout.zero = {layout.zero}",
            f"shard inside groups and average between them, such as shard{max(layout.cp, 2)}; or drop the sharding",
        )
    elif replicas < 2:
        yield _bad(
            policy.rule,
            "local steps are averaged over replicas, and the plan has one",
            f"layout.dp = {layout.dp}",
            "give the plan dp of 2 or more, or a smaller shard; or drop sync",
        )
    elif layout.shard % layout.cp:
        yield _bad(
            policy.rule,
            f"a sharding scope of {layout.shard} cuts through the {layout.cp} ranks that share a sequence",
            f"layout.shard = {layout.shard}",
            f"take a multiple of cp = {layout.cp}",
        )
    if plan.experts.ep > 1 or plan.etp != layout.tp:
        yield _bad(
            policy.rule,
            "experts that are spread over replicas take tokens of all of them in every step",
            f"experts.ep = {plan.experts.ep}",
            "drop ep and etp, so that every replica has all experts",
        )
    if len(cluster.islands) > 1 and together(plan) > 1:
        yield _bad(
            policy.rule,
            "ranks that step together are on one island each, and those of this plan may not be",
            f"layout.cp = {layout.cp}, layout.shard = {layout.shard}",
            "drop cp and shard on unequal islands",
        )
    if codec(policy.codec).adapts:
        yield _bad(
            policy.rule,
            f"{policy.values['codec']} chooses ranks by gradients, and local steps exchange changes of parameters",
            f"sync.policy = {policy.text}",
            "take codec=powersgd, which has one rank for all",
        )
    if codec(policy.codec).correction:
        yield _bad(
            policy.rule,
            f"{policy.values['codec']} gathers gradients with momentum, and local steps exchange changes of parameters",
            f"sync.policy = {policy.text}",
            "take codec=topk, which sends the largest changes",
        )
    if not combine(policy.combine).added:
        yield from uncombined(plan, policy, replicas)
    elif layout.shares:
        yield _bad(
            policy.rule,
            "replicas with unequal shares of the batch have no plain mean",
            f"layout.shares = {layout.shares}",
            "drop shares",
        )


def unmet(
    plan: Plan, policy: SyncPolicy, refused: Callable[[str, int], tuple[str, str] | None], lack: str
) -> Iterator[Diagnostic]:
    """Y003 for a graph whose neighbours a rule cannot use: `refused` gives the reason and a graph that is legal, of a
    graph's words and the number of replicas; `lack` is what replicas do not have there."""
    _, replicas = between(plan)
    found = refused(policy.group, replicas) if replicas > 1 else None
    if found is not None:
        reason, legal = found
        yield Diagnostic(
            code="Y003",
            message=f"{replicas} replicas on graph={policy[GRAPH]} {lack}: {reason}",
            place=f"plan.sync.policy = {policy.text}",
            help=f"take {legal}",
        )


def _bad(rule: SyncRule, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y003", message=message, place=f"plan.{place} with sync={rule.name}", help=help)


LOCAL = SyncRule(
    name="local",
    title="local steps",
    paper="Stich, 2018, arXiv 1805.09767",
    exact=False,
    options=(
        RuleOption(name="h", what="local steps between two averages", example=8),
        RuleOption(name="codec", what="the code of what is averaged", default="none", choices=lambda: tuple(codecs())),
        RuleOption(name="combine", what="how parameters become one", default="mean", choices=lambda: ways("mean")),
        RuleOption(
            name="moments",
            what="whether the optimizer's moments stay a replica's own or are averaged",
            default=OWN,
            choices=lambda: (OWN, MEAN),
        ),
    ),
    choices=choices,
    fragments=fragments,
    together=together,
    wrong=wrong,
)

RULES = (LOCAL,)
