"""Scopes of state: weights, gradients and optimizer states sharded over groups of ranks nested in one another.

What is needed most often stays closest. Under ``fsdp scopes=2,8`` a rank has half of the weights that it computes
with, so that every pass gathers them from its neighbour alone; an eighth of the gradients that accumulate, scattered
over a node after every pass; and of the optimizer's states what the whole job leaves for it. Sums are scattered on
over all nodes once a step, and updated weights come back the same way (Xu et al., 2025, arXiv 2501.04266).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import Diagnostic
from meshwright.plan.facet import wrong
from meshwright.plan.facets.sequence import STATIC
from meshwright.sync.policy import read

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


def scopes_wrong(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Scopes that do not lie in one another, or beside what has one scope for all state."""
    layout = plan.layout
    if not layout.scopes:
        return
    place = f"layout.scopes = {layout.scopes}"
    if len(layout.scopes) != 2:
        message = f"scopes= has {len(layout.scopes)} of two numbers: the ranks that shard weights, then gradients"
        yield wrong("P019", message, place, "say for example scopes=2,8")
        return
    weights, gradients = layout.scopes
    whole = layout.shard_group
    if gradients % weights or whole % gradients:
        message = f"weights over {weights} ranks, gradients over {gradients} and optimizer states over {whole}"
        yield wrong("P019", f"{message} are not nested: each divides the next", place, "say such as scopes=2,8")
    elif weights == 1:
        message = "weights over one rank are whole, and nothing is gathered for a pass"
        yield wrong("P019", message, place, "say zero2, or scopes= with 2 or more first")
    for said, message, fix in (
        (layout.zero < 3, f"zero{layout.zero} keeps weights whole, which scopes= shards", "say fsdp"),
        (layout.pp > 1, "under a pipeline weights are gathered once a step, in one scope", "drop pp, or scopes"),
        (bool(model.mixtures), "experts are sharded over the ranks that have the same ones", "drop scopes"),
        (plan.kinds.any, "replicas that differ hold state of other sizes", "drop mbs, hold and dtypes, or scopes"),
        (len(set(layout.shares)) > 1, "replicas with unequal shares meet once a step", "drop shares, or scopes"),
        (plan.offload.any or plan.offload.tiles > 1, "state off the device has one scope", "drop offload, or scopes"),
        (plan.sequence.groups != STATIC, "ranks that share documents meet in one scope", "drop groups, or scopes"),
        (train.lora is not None, "a base that is not trained has no gradients to scope", "drop scopes"),
        (plan.precision.params != "bf16", "stored weights have one scope", "drop params=, or scopes"),
    ):
        if said:
            yield wrong("P061", f"scopes={weights},{gradients}: {message}", place, fix)
    policy = read(plan.sync.policy)
    if not policy.rule.scoped or (policy.rule.exact and not policy.plain):
        message = f"scopes={weights},{gradients}: sync={policy.text} exchanges state that has one scope"
        yield wrong("P061", message, place, "take sync=step or sync=qsdp, or drop scopes")
