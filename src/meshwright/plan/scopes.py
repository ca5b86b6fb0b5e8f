"""Scopes of state: weights, gradients and optimizer states sharded over groups of ranks nested in one another.

What is needed most often stays closest. Under ``fsdp scopes=2,8`` a rank has half of the weights that it computes
with, so that every pass gathers them from its neighbour alone; an eighth of the gradients that accumulate, scattered
over a node after every pass; and of the optimizer's states what the whole job leaves for it. Sums are scattered on
over all nodes once a step, and updated weights come back the same way (Xu et al., 2025, arXiv 2501.04266).

Under ``fsdp hpz8`` all state is sharded over all ranks, and a forward's weights are gathered from all of them. What it
gathered stays behind as a second copy, sharded over 8 neighbours, until the backward has gathered it there (ZeRO++'s
hierarchical partitioning, Wang et al., 2023, arXiv 2306.10209, which has this copy as long as a step).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import Diagnostic
from meshwright.plan.facet import listed, wrong
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
    yield from _beside(f"scopes={weights},{gradients}", "scopes", plan, model, train)
    for said, message, fix in (
        (layout.zero < 3, f"zero{layout.zero} keeps weights whole, which scopes= shards", "say fsdp"),
        (layout.hpz > 0, "weights that are gathered near for every pass need no second copy", "drop hpz, or scopes"),
    ):
        if said:
            yield wrong("P061", f"scopes={weights},{gradients}: {message}", place, fix)


def copy_wrong(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """A second copy of weights that is not inside the group that shards them, or beside what it does not go with."""
    layout = plan.layout
    near, whole, place = layout.hpz, layout.shard_group, f"layout.hpz = {layout.hpz}"
    policy = read(plan.sync.policy)
    first = policy.values.get("near", 1)
    if first > 1 and near not in (0, first):
        message = f"hpz{near}: sync={policy.text} makes sums among {first} neighbours, and a copy lies among {near}"
        yield wrong("P061", message, place, f"say near={near}, or hpz{first}")
    if not near:
        return
    if layout.zero < 3:
        message = f"hpz{near}: zero{layout.zero} keeps weights whole, of which there is no second copy"
        yield wrong("P061", message, place, "say fsdp, or drop hpz")
    elif whole % near or not 1 < near < whole:
        message = f"hpz{near} is no part of the {whole} ranks that shard weights"
        yield wrong("P019", message, place, f"valid: {listed(whole, whole - 1).removeprefix('1, ')}, or drop hpz")
    yield from _beside(f"hpz{near}", "hpz", plan, model, train)


def _beside(said: str, word: str, plan: Plan, model: Model, train: Train) -> Iterator[Diagnostic]:
    """Refusals of what weights that are gathered near do not go with."""
    layout, policy = plan.layout, read(plan.sync.policy)
    place = f"layout.{word} = {getattr(layout, word)}"
    for wrongly, message, fix in (
        (layout.pp > 1, "under a pipeline weights are gathered once a step, in one scope", f"drop pp, or {word}"),
        (bool(model.mixtures), "experts are sharded over the ranks that have the same ones", f"drop {word}"),
        (plan.kinds.any, "replicas that differ hold state of other sizes", f"drop mbs, hold and dtypes, or {word}"),
        (len(set(layout.shares)) > 1, "replicas with unequal shares meet once a step", f"drop shares, or {word}"),
        (plan.offload.any or plan.offload.tiles > 1, "state off the device has one scope", f"drop offload, or {word}"),
        (plan.sequence.groups != STATIC, "ranks that share documents meet in one scope", f"drop groups, or {word}"),
        (train.lora is not None, "a base that is not trained has no gradients to scope", f"drop {word}"),
        (plan.precision.params != "bf16", "stored weights have one scope", f"drop params=, or {word}"),
    ):
        if wrongly:
            yield wrong("P061", f"{said}: {message}", place, fix)
    if not policy.rule.scoped or (policy.rule.exact and not policy.plain):
        message = f"{said}: sync={policy.text} exchanges state that has one scope"
        yield wrong("P061", message, place, f"take sync=step or sync=qsdp, or drop {word}")
