"""Clients of a model that is pruned more and more (FedDIP, Long et al. 2309.06805)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.errors import Diagnostic
from meshwright.sync.clients.cohort import Rota
from meshwright.sync.clients.pruned import Pruned
from meshwright.sync.options import RuleOption
from meshwright.sync.pruning import Pruning
from meshwright.sync.rules import SyncRule
from meshwright.sync.rules.clients import CODEC, SAMPLE, STEPS, choices, fragments
from meshwright.sync.rules.clients import wrong as unserved

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def pruning(values: dict[str, Any]) -> Pruning:
    """The mask and the penalty that the options say."""
    return Pruning(
        rounds=values["rounds"],
        first=values["first"],
        last=values["last"],
        every=values["every"],
        penalty=values["penalty"],
    )


def decider(values: dict[str, Any], count: int) -> Pruned:
    """The decider of so many clients."""
    sample = min(values["clients"] or count, count)
    cohorts = Rota(num_clients=count, sample=sample, steps=values["h"], least=sample)
    return Pruned(cohorts=cohorts, pruning=pruning(values))


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts whose replicas are no clients, and masks that are not cut further."""
    yield from unserved(plan, cluster, policy)
    if policy["last"] < policy["first"]:
        yield Diagnostic(
            code="Y003",
            message=f"a mask of {policy['first']:g} zeros at first is not cut further to last={policy['last']:g}",
            place=f"plan.sync.policy = {policy.text}",
            help=f"say last={policy['first']:g} or more",
        )


FEDDIP = SyncRule(
    name="feddip",
    title="a model that is pruned more and more, with a penalty that grows",
    paper="Long et al., 2023, arXiv 2309.06805",
    exact=False,
    choices=lambda values: choices(values) | {"pruning": pruning(values)},
    fragments=fragments,
    together=lambda plan: 1,
    options=(
        STEPS,
        SAMPLE,
        RuleOption(name="rounds", what="rounds until the mask is cut as far as it is to be", example=100),
        RuleOption(
            name="first", what="the part of the values that is zero at first", default=0.5, share=True, most=0.9999
        ),
        RuleOption(name="last", what="the part that is zero in the end", default=0.9, share=True, most=0.9999),
        RuleOption(name="every", what="rounds from one cut of the mask to the next", default=5),
        RuleOption(
            name="penalty", what="the largest penalty on a matrix's length", default=1e-3, share=True, least=0, most=1e3
        ),
        CODEC,
    ),
    wrong=wrong,
    vectors_apart=True,
    decider=decider,
)

RULES = (FEDDIP,)
