"""Every step: gradients are summed over all replicas before each update, so that all hold the same parameters.

DDP's buckets (Li et al. 2006.15704), ZeRO's stages (Rajbhandari et al. 1910.02054), FSDP and hybrid sharding (Zhao et
al. 2304.11277) are this rule on different layouts. With a codec, what goes between the copies of a gradient is encoded;
with a combine such as ``median`` every copy gets what all others have, and takes what some of them bring to no harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.codecs import codec, codecs
from meshwright.sync.combines import combine, combines, ways
from meshwright.sync.fragments import GRADIENTS, Fragment, Stored, Weights, gradients
from meshwright.sync.options import RuleOption
from meshwright.sync.rules import SyncRule
from meshwright.sync.scoped import gathers, scoped

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def sums(field: str, decided: object) -> dict[str, Any]:
    """The choices of a rule that sums gradients in every step, with a field of the policy that a prediction fills in
    where it is not `decided` (None)."""
    said = {"fragments": (GRADIENTS,), "combine": "sum"}
    return said | ({"undecided": True} if decided is None else {field: decided})


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Gradients to the sums, and what is sharded gathered for the passes."""
    if plan.layout.scopes:
        yield from scoped(plan, weights, stored)
        return
    if weights.trained:
        summed = gradients(plan, weights, stored)
        yield summed if policy.plain else msgspec.structs.replace(summed, codec=policy.codec, combine=policy.combine)
    if plan.layout.zero:
        yield from gathers(plan, weights, stored)


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts in which gradients cannot be exchanged encoded, or combined in another way than added."""
    if policy.plain:
        return
    layout, word, code, how = plan.layout, policy.text, codec(policy.codec), combine(policy.combine)
    if not how.added:
        yield from uncombined(plan, policy, layout.dp * layout.cp // (layout.shard_group if layout.zero else 1))
    what = f"values in {policy.codec}" if how.added else f"values whose {how.name} is taken"
    replicas = layout.dp * layout.cp
    if replicas < 2:
        yield _bad(
            word,
            f"gradients are {'encoded' if how.added else 'combined'} between replicas, and the plan has one",
            f"layout.dp = {layout.dp}",
            "give the plan dp of 2 or more, or drop sync",
        )
    elif layout.zero and (layout.shards_gradients or layout.shard_group >= replicas):
        scopes = [n for n in range(2, replicas) if replicas % n == 0]
        inside = f"take zero1 with shard{scopes[0]}, whose groups exchange encoded sums; or" if scopes else "drop zero:"
        sent = "summed in several messages" if how.added and code.summed else "gathered by every rank"
        yield _bad(
            word,
            f"zero{layout.zero} scatters sums while they are taken, and {what} are {sent}",
            f"layout.zero = {layout.zero}",
            f"{inside} exchange whole gradients",
        )


def uncombined(plan: Plan, policy: SyncPolicy, replicas: int) -> Iterator[Diagnostic]:
    """Plans in which what so many `replicas` bring cannot be combined in another way than added."""
    layout, word, how = plan.layout, policy.text, combine(policy.combine)
    if 1 < replicas < how.fewest:
        yield _bad(
            word,
            f"{policy.combine} is taken of {how.fewest} replicas at least, and {replicas} exchange",
            f"layout.dp = {layout.dp}",
            f"give the plan {how.fewest} replicas that exchange, or combine=mean",
        )
    if layout.tp > 1 and not how.each:
        legal = " or ".join(one.name for one in combines().values() if one.each and not one.added)
        yield _bad(
            word,
            f"tensor-parallel ranks hold some parameters alike, and {how.name} combines them by what is beside them, "
            "which differs",
            f"layout.tp = {layout.tp}",
            f"take {legal}, which combine every value by itself; or drop tp",
        )
    if codec(policy.codec).factors is not None:
        yield _bad(
            word,
            f"{policy.codec} adds factors on their way, and {how.name} needs what every replica has",
            f"sync.policy = {word}",
            "take another codec, or combine=mean",
        )
    if layout.shares:
        yield _bad(
            word,
            f"replicas with unequal shares bring sums of unequal weight, and {how.name} counts them alike",
            "layout.shares",
            "drop shares, or combine=mean",
        )


def unexchanged(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Plans in which what replicas make of their own gradients cannot be exchanged in place of these."""
    yield from wrong(plan, cluster, msgspec.structs.replace(policy, combine="sum"))  # two may vote
    if plan.experts.ep > 1 and plan.edp == 1:
        yield _bad(
            policy.text,
            "every expert is on one replica, whose gradients of it no other has",
            f"experts.ep = {plan.experts.ep}",
            "take a smaller ep, so that every expert has copies, or drop sync",
        )


def _bad(word: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y003", message=message, place=f"plan.{place} with sync={word}", help=help)


STEP = SyncRule(
    name="step",
    title="every step",
    paper="Li et al., 2020, arXiv 2006.15704",
    exact=True,
    choices=lambda values: {"fragments": (GRADIENTS,)},
    fragments=fragments,
    options=(
        RuleOption(
            name="codec", what="the code of gradients on the wire", default="none", choices=lambda: tuple(codecs())
        ),
        RuleOption(name="combine", what="how gradients become one", default="sum", choices=lambda: ways("sum")),
    ),
    together=lambda plan: plan.layout.dp * plan.layout.cp,
    wrong=wrong,
    scoped=True,
)

RULES = (STEP,)
