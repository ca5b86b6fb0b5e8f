"""QSDP (Markov et al. 2302.02390): sharded training whose gathers send quantised weights, and whose scatters send
quantised gradients.

Weights go to levels of their bucket that are moved by a random part (``lattice``), gradients are rounded at random
(``qsgd``); vectors, those of norms and biases, travel as they are. What is updated stays at full precision, each shard
with its owner. A sum of codes is none: every rank sends each other the codes of its part of that one's shard, and the
owner adds up what it decodes. With ``near=8`` eight neighbours do so first, and send their sums on in a code again to
the ranks with the same part, so that a node's ports carry an eighth of it (ZeRO++'s, too, Wang et al. 2306.10209).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import Diagnostic
from meshwright.sync.codecs.buckets import BITS
from meshwright.sync.fragments import (
    EXPERT,
    GATHERED,
    GRADIENTS,
    VECTOR,
    Fragment,
    Stored,
    Weights,
    gradients,
)
from meshwright.sync.options import RuleOption
from meshwright.sync.record import NO_CODEC
from meshwright.sync.rules import SyncRule
from meshwright.sync.scoped import gathers, in_hops, scoped

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.sync.record import SyncPolicy


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Gradients to the sums of shards, and shards gathered for the passes, each in its code."""
    plain, tensors = weights.kind == VECTOR, () if plan.layout.zero < 3 else weights.tensors
    if plan.layout.scopes:
        codes = {} if plain else {GRADIENTS: policy.codec, GATHERED: f"lattice:bits={policy['weights']}"}
        yield from scoped(plan, weights, stored, codes)
        return
    if weights.trained:
        code = NO_CODEC if plain else policy.codec
        summed = msgspec.structs.replace(gradients(plan, weights, stored), within=code, tensors=tensors)
        yield from in_hops(plan, summed) if policy["near"] > 1 else (summed,)
    yield from gathers(plan, weights, stored, NO_CODEC if plain else f"lattice:bits={policy['weights']}")


def choices(values: dict[str, Any]) -> dict[str, Any]:
    """The seven choices of QSDP: gradients and weights in every step, in codes."""
    return {"fragments": (GRADIENTS, GATHERED), "combine": "sum", "codec": f"qsgd:bits={values['grads']}"}


def wrong(plan: Plan, cluster: Cluster, policy: SyncPolicy) -> Iterator[Diagnostic]:
    """Layouts that shard nothing, or in which ranks hold some values alike and others not."""
    layout = plan.layout
    if not layout.zero or layout.shard_group < 2:
        yield _bad(
            policy.text,
            "weights are gathered and gradients scattered where they are sharded, and the plan shards none",
            f"layout.zero = {layout.zero}",
            "take fsdp, zero2 or zero1, or sync=int8, which encodes whole gradients",
        )
    near, whole = policy["near"], layout.shard_group
    if near > 1 and not layout.gathers_again:
        yield _bad(
            policy.text,
            "sums among neighbours first are of layers that are gathered for every pass",
            f"layout.zero = {layout.zero}",
            "take fsdp without pp, or drop near",
        )
    elif near > 1 and (layout.scopes or whole % near or near >= whole):
        yield _bad(
            policy.text,
            f"{near} neighbours are no part of the {whole} ranks that sum a gradient"
            + " once: scopes have parts of their own" * bool(layout.scopes),
            f"layout.shard_group = {whole}",
            "drop near" if layout.scopes else f"let near be a divisor of {whole} below it",
        )
    if layout.tp > 1:
        yield _bad(
            policy.text,
            "tensor-parallel ranks hold some parameters alike, which lie beside others in a shard's code",
            f"layout.tp = {layout.tp}",
            "drop tp",
        )
    if plan.experts.ep > 1:
        yield _bad(
            policy.text,
            f"{EXPERT}s that are spread over ranks are sharded among fewer, beside others in a code",
            f"experts.ep = {plan.experts.ep}",
            "drop ep",
        )


def _bad(word: str, message: str, place: str, help: str) -> Diagnostic:
    return Diagnostic(code="Y003", message=message, place=f"plan.{place} with sync={word}", help=help)


QSDP = SyncRule(
    name="qsdp",
    title="quantised weights and gradients of sharded training",
    paper="Markov et al., 2023, arXiv 2302.02390",
    exact=False,
    choices=choices,
    fragments=fragments,
    options=(
        RuleOption(name="weights", what="the bits of a weight that is gathered", default="8", choices=BITS.choices),
        RuleOption(name="grads", what="the bits of a gradient that is scattered", default="8", choices=BITS.choices),
        RuleOption(name="near", what="the neighbours that make a gradient's sum among themselves first", default=1),
    ),
    together=lambda plan: plan.layout.dp * plan.layout.cp,
    wrong=wrong,
    vectors_apart=True,
    scoped=True,
)

RULES = (QSDP,)
