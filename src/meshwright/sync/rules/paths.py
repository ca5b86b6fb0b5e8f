"""Replicas that hold models of their own, in part or whole.

DiPaCo (Douillard et al. 2403.10616): DiLoCo's rounds module by module; ``levels=2x2`` are four paths of two modules at
each of two levels. Decentralised diffusion models (McAllister et al. 2501.05450): experts that never exchange
anything, each trained on a cluster of the data, whose predictions a router weighs; here of images or of text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.fragments import EVERY, PARAMETERS, Fragment, Stored, Weights
from meshwright.sync.options import RuleOption, numbers_of_levels
from meshwright.sync.paths import HIDDEN, PIXELS, ModulePaths
from meshwright.sync.record import Outer
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.diloco import coded, outer
from meshwright.sync.rules.local import between, together, wrong

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy

YES, NO = "yes", "no"
PREFIX = RuleOption(name="prefix", what="tokens of a sequence that it is routed by, and that nobody learns", default=32)


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Local steps' fragments, whose averages go by an outer step; none of parameters where no module is shared."""
    from meshwright.sync.rules.local import fragments as local

    for f in local(plan, policy, weights, stored):
        if f.due != EVERY:
            yield f
        elif policy.fragments:
            yield msgspec.structs.replace(f, outer=policy.outer)


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of rounds module by module."""
    levels = numbers_of_levels(values["levels"]) or ()
    return {
        "when": values["h"],
        "fragments": (PARAMETERS,),
        "combine": "mean",
        "outer": Outer(rate=values["rate"], momentum=values["momentum"], nesterov=True),
        "paths": ModulePaths(
            levels=levels, prefix=values["prefix"], rescaled=values["rescale"] == YES, overlap=values["overlap"]
        ),
    }


def on_islands(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts whose replicas are no paths."""
    yield from wrong(plan, cluster, policy)
    replicas, name = between(plan)[1], policy.rule.name
    count = policy.paths.count(replicas)
    if replicas >= 2 and replicas % count:
        yield _bad(
            name,
            f"{replicas} replicas are not as many for each of the {count} paths of levels={policy.values['levels']}",
            f"layout.dp = {plan.layout.dp}",
            f"give the plan a multiple of {count} replicas, or say other levels",
        )
    if policy.paths.overlap > count:
        said = f"overlap={policy.paths.overlap} of {count} paths"
        yield _bad(name, said, f"sync.policy = {policy.text}", f"say overlap={count} at most")
    if len(cluster.islands) > 1:
        help = "name a cluster of equal islands, or say sync=diloco"
        yield _bad(name, "paths on islands that differ are not timed module by module", "sync.policy", help)
    if plan.layout.cp > 1 and plan.layout.order.index("cp") > plan.layout.order.index("dp"):
        yield _bad(
            name,
            "the ranks of a replica are apart from each other",
            f"layout.order = {plan.layout.order}",
            "put cp inside of dp",
        )


def _bad(name: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y003", message=message, place=f"plan.{place} with sync={name}", help=help)


DIPACO = SyncRule(
    name="dipaco",
    title="paths of shared modules, averaged module by module",
    paper="Douillard et al., 2024, arXiv 2403.10616",
    exact=False,
    options=(
        RuleOption(name="levels", what="modules of each level of the model", example="2x2", leveled=True),
        RuleOption(name="h", what="local steps of a round", default=150),
        coded(),
        *outer(0.7, 0.9),
        RuleOption(
            name="rescale",
            what="whether a module's mean change is longer by the root of the number of paths through it",
            default=YES,
            choices=lambda: (YES, NO),
        ),
        PREFIX,
        RuleOption(name="overlap", what="of how many nearest paths a sequence is when they train", default=1),
    ),
    choices=choices,
    fragments=fragments,
    together=together,
    wrong=on_islands,
)
DDM = SyncRule(
    name="ddm",
    title="experts on clusters of the data, without any exchange",
    paper="McAllister et al., 2025, arXiv 2501.05450",
    exact=False,
    options=(
        PREFIX,
        RuleOption(
            name="features",
            what="what clusters of images are made by, unless --clusters says them",
            default=HIDDEN,
            choices=lambda: (HIDDEN, PIXELS),
        ),
    ),
    choices=lambda values: {
        "fragments": (),
        "combine": "mean",
        "paths": ModulePaths(levels=(), prefix=values["prefix"], mixed=True, features=values["features"]),
    },
    fragments=fragments,
    together=together,
    wrong=on_islands,
)

RULES = (DIPACO, DDM)
