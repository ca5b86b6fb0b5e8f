"""Every step: gradients are summed over all replicas before each update, so that all hold the same parameters.

DDP's buckets (Li et al. 2006.15704), ZeRO's stages (Rajbhandari et al. 1910.02054), FSDP and hybrid sharding (Zhao et
al. 2304.11277) are this rule on different layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.sync.fragments import GRADIENTS, Fragment, Stored, Weights, gathered, gradients
from meshwright.sync.rules import SyncRule

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.sync.record import SyncPolicy


def fragments(plan: Plan, policy: SyncPolicy, weights: Weights, stored: Stored) -> Iterator[Fragment]:
    """Gradients to the sums, and what is sharded gathered for the passes."""
    if weights.trained:
        yield gradients(plan, weights, stored)
    if plan.layout.zero:
        yield gathered(plan, weights, stored)


STEP = SyncRule(
    name="step",
    title="every step",
    paper="Li et al., 2020, arXiv 2006.15704",
    exact=True,
    choices=lambda values: {"fragments": (GRADIENTS,), "combine": "sum"},
    fragments=fragments,
    together=lambda plan: plan.layout.dp * plan.layout.cp,
)

RULES = (STEP,)
