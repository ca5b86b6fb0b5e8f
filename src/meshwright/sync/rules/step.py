"""Every step: gradients are summed over all replicas before each update, so that all hold the same parameters.

DDP's buckets (Li et al. 2006.15704), ZeRO's stages (Rajbhandari et al. 1910.02054), FSDP and hybrid sharding (Zhao et
al. 2304.11277) are this rule on different layouts. With a codec, what goes between the copies of a gradient is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.codecs import codec, codecs
from meshwright.sync.fragments import GRADIENTS, Fragment, Stored, Weights, gathered, gradients
from meshwright.sync.options import RuleOption
from meshwright.sync.rules import SyncRule

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Gradients to the sums, and what is sharded gathered for the passes."""
    if weights.trained:
        summed = gradients(plan, weights, stored)
        yield msgspec.structs.replace(summed, codec=policy.codec) if policy.coded else summed
    if plan.layout.zero:
        yield gathered(plan, weights, stored)


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts in which encoded gradients cannot be exchanged."""
    if not policy.coded:
        return
    layout, word, code = plan.layout, policy.text, codec(policy.codec)
    replicas = layout.dp * layout.cp
    if replicas < 2:
        yield _bad(
            word,
            "gradients are encoded between replicas, and the plan has one",
            f"layout.dp = {layout.dp}",
            "give the plan dp of 2 or more, or drop sync",
        )
    elif layout.zero and (layout.shards_gradients or layout.shard_group >= replicas):
        scopes = [n for n in range(2, replicas) if replicas % n == 0]
        inside = f"take zero1 with shard{scopes[0]}, whose groups exchange encoded sums; or" if scopes else "drop zero:"
        how = "gathered by every rank" if not code.summed else "summed in several messages"
        yield _bad(
            word,
            f"zero{layout.zero} scatters sums while they are taken, and values in {policy.codec} are {how}",
            f"layout.zero = {layout.zero}",
            f"{inside} exchange whole gradients",
        )
    if layout.tp > 1 and not code.each:
        legal = " or ".join(one.name for one in codecs().values() if one.each)
        yield _bad(
            word,
            f"tensor-parallel ranks hold some parameters alike, and {policy.codec} encodes them by what is beside "
            "them, which differs",
            f"layout.tp = {layout.tp}",
            f"take {legal}, which encode every value by itself; or drop tp",
        )


def _bad(word: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y003", message=message, place=f"plan.{place} with sync={word}", help=help)


STEP = SyncRule(
    name="step",
    title="every step",
    paper="Li et al., 2020, arXiv 2006.15704",
    exact=True,
    choices=lambda values: {"fragments": (GRADIENTS,), "combine": "sum"},
    fragments=fragments,
    options=(
        RuleOption(
            name="codec", what="the code of gradients on the wire", default="none", choices=lambda: tuple(codecs())
        ),
    ),
    together=lambda plan: plan.layout.dp * plan.layout.cp,
    wrong=wrong,
)

RULES = (STEP,)
