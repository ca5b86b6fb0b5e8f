"""Exchanges of state with a scope for each kind: weights, gradients and optimizer states over nested groups of ranks.

Weights are gathered over their own scope for every pass. Gradients are scattered over it and then on to their own, so
that a rank adds up its part after every pass; once a step these parts are scattered on over the optimizer's scope
(``FOLDED``) and summed over its copies. What a rank has updated comes back the same way: first over the optimizer's
scope, then over that of the gradients (``REFRESHED``), which makes its part of the weights whole again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from meshwright.sync.fragments import (
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
from meshwright.sync.record import NO_CODEC

if TYPE_CHECKING:
    from meshwright.plan import Layout, Plan

#: Groups by their names in a mesh: ranks that have the weights together, those among which a rank's part of a sum of
#: such a group is scattered on, and those among which that is once a step.
WEIGHT_SHARD, GRADIENT_SHARD, OPTIMIZER_SHARD = "weight_shard", "gradient_shard", "optimizer_shard"


def nested(layout: Layout) -> tuple[Among, Among, Among]:
    """The groups over which weights, then gradients, then optimizer states are sharded, each besides those before."""
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
    inner, middle, outer = nested(layout)
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
