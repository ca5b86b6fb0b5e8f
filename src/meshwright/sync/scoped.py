"""Exchanges of state with a scope for each kind: weights, gradients and optimizer states over nested groups of ranks.

Weights are gathered over their own scope for every pass. Gradients are scattered over it and then on to their own, so
that a rank adds up its part after every pass; once a step these parts are scattered on over the optimizer's scope
(``FOLDED``) and summed over its copies. What a rank has updated comes back the same way: first over the optimizer's
scope, then over that of the gradients (``REFRESHED``), which makes its part of the weights whole again.

Where neighbours keep a second copy of weights that are sharded over all (``hpz``), only forwards gather those of all;
a backward gathers what its forward has left (``AGAIN``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from meshwright.sync.fragments import (
    AGAIN,
    FOLDED,
    GATHERED,
    GRADIENTS,
    PASS,
    REFRESHED,
    SELF,
    STEP,
    Among,
    Fragment,
    Stored,
    Weights,
    gathered,
    gradients,
)
from meshwright.sync.policy import read
from meshwright.sync.record import NO_CODEC

if TYPE_CHECKING:
    from meshwright.plan import Plan

#: Groups by their names in a mesh: ranks that have the weights together, those among which a rank's part of a sum of
#: such a group is scattered on, and those among which that is once a step.
WEIGHT_SHARD, GRADIENT_SHARD, OPTIMIZER_SHARD = "weight_shard", "gradient_shard", "optimizer_shard"
#: Neighbours that keep a second copy of weights together, or make a sum among themselves first, and the ranks with a
#: neighbour's part of it.
NEAR, FAR = "near", "far"


def neighbours(plan: Plan) -> int:
    """The neighbours that keep a second copy of weights, or that sums are made among first; 1 where there are none."""
    return plan.layout.hpz or read(plan.sync.policy).values.get("near", 1)


def nested(plan: Plan) -> tuple[Among, ...]:
    """The groups over which weights, then gradients, then optimizer states are sharded, each besides those before; of
    one scope with neighbours in it these, and the ranks with the same part. Nothing where all state has one scope."""
    layout, near = plan.layout, neighbours(plan)
    if near > 1:
        return Among(NEAR, near), Among(FAR, layout.shard_group // near)
    if not layout.scopes:
        return ()
    weights, sums, whole = layout.weights_over, layout.gradients_over, layout.shard_group
    return (
        Among(WEIGHT_SHARD, weights),
        Among(GRADIENT_SHARD, sums // weights),
        Among(OPTIMIZER_SHARD, whole // sums),
    )


def scoped(plan: Plan, weights: Weights, stored: Stored, codes: Mapping[str, str] | None = None) -> Iterator[Fragment]:
    """The exchanges of some parameters; `codes` are those of gradients and of gathered weights, by what is
    exchanged."""
    codes, layout = codes or {}, plan.layout
    inner, middle, outer = nested(plan)
    code = codes.get(GRADIENTS, NO_CODEC)
    replace = msgspec.structs.replace
    whole = gathered(plan, weights, stored)
    yield replace(whole, shard=inner, within=codes.get(GATHERED, NO_CODEC), tensors=weights.tensors)
    if not weights.trained:
        return
    first = replace(gradients(plan, weights, stored), shard=inner, replica=SELF, due=PASS, within=code)
    yield replace(first, tensors=weights.tensors)
    part = weights.trained / inner.size
    yield replace(first, num_elements=part, shard=middle, tensors=())
    copies = Among("replica", layout.dp * layout.cp // layout.shard_group)
    mine = part / middle.size
    folded = replace(first, what=FOLDED, num_elements=mine, shard=outer, replica=copies, due=STEP, tensors=())
    yield replace(folded, beside=False)
    back = Fragment(
        what=REFRESHED,
        units=weights[:2],
        kind=weights.kind,
        num_elements=mine,
        element_bytes=stored.weights,
        shard=outer,
        combine="joined",
        apply="parameters",
    )
    yield back
    yield replace(back, num_elements=part, shard=middle)


def gathers(plan: Plan, weights: Weights, stored: Stored, within: str = NO_CODEC) -> Iterator[Fragment]:
    """Parameters sharded over one scope, gathered for the passes in the code `within`; those of which neighbours keep a
    second copy, for the forward alone, and that copy as the code has left it for the backward."""
    tensors = () if plan.layout.zero < 3 or within == NO_CODEC else weights.tensors
    first = msgspec.structs.replace(gathered(plan, weights, stored), within=within, tensors=tensors)
    yield first
    if plan.layout.hpz:
        near, _ = nested(plan)
        yield msgspec.structs.replace(first, what=AGAIN, shard=near, within=NO_CODEC, tensors=())


def in_hops(plan: Plan, first: Fragment) -> Iterator[Fragment]:
    """Encoded gradients scattered among neighbours, then, summed and encoded anew, on among those with the same part
    (ZeRO++'s, Wang et al., 2023, arXiv 2306.10209)."""
    near, far = nested(plan)
    whole = near.size * far.size
    # a rank's rows are as many as those of the rank with the most, also on their way
    tensors = tuple(one._replace(rows=ceil(one.rows / whole) * whole) for one in first.tensors)
    replace = msgspec.structs.replace
    yield replace(first, shard=near, replica=SELF, tensors=tensors)
    on = tuple(one._replace(rows=one.rows // near.size) for one in tensors)
    yield replace(first, num_elements=first.num_elements / near.size, shard=far, tensors=on)
