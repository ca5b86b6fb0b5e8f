"""Frozen layers that are run ahead of each step (``fill_layers=``, ``filling=``, a model's own): how many, where their
passes go, and what they do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan.facet import wrong
from meshwright.plan.facets.pipeline import BEFORE, WAITS
from meshwright.spec.layers import Moe
from meshwright.spec.parts import part_of
from meshwright.sync.record import USUAL

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


def num_frozen(plan: Plan, model: Model) -> int:
    """The first layers that are frozen and run ahead of each step: those the plan says, or those that a model has of
    itself. Of several pools those of a frozen pool are run there."""
    return 0 if plan.several else plan.pipeline.fill or model.frozen


def way(plan: Plan) -> str:
    """Where the passes of frozen layers go."""
    return plan.pipeline.filling or (WAITS if plan.pipeline.fill else BEFORE)


def without_frozen(plan: Plan) -> Plan:
    """The plan of the layers that are trained."""
    return msgspec.structs.replace(plan, pipeline=msgspec.structs.replace(plan.pipeline, fill=0, filling=""))


def trained_part(plan: Plan, model: Model) -> Model:
    """The layers that are trained, as a model."""
    count = num_frozen(plan, model)
    return part_of(model, count, model.num_layers) if count < model.num_layers else model


def frozen_part(plan: Plan, model: Model) -> Model:
    """The layers that are frozen, as a model."""
    return part_of(model, 0, num_frozen(plan, model))


def rules(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield P079 for everything that keeps a model's first layers from being run ahead of each step."""
    count, layout, found = num_frozen(plan, model), plan.layout, []
    own = model.frozen and not plan.pipeline.fill
    if plan.pipeline.fill and model.frozen and plan.pipeline.fill != model.frozen:
        why = f"{model.name} has {model.frozen} frozen layers of its own, and fill_layers= says {count}"
        found.append((why, "drop fill_layers=: filling= alone says where those are run"))
    if count >= model.num_layers:
        found.append(
            (
                f"{count} frozen layers leave none of {model.name}'s {model.num_layers} to train",
                "a smaller fill_layers=",
            )
        )
    if layout.pp == 1 and way(plan) != BEFORE:
        help = f"say pp2 or more, or {'filling=before' if own else 'a pool that is frozen'}"
        found.append(("a plan without a pipeline has no waits to fill", help))
    if schedules.get(plan.pipeline.schedule).placement == "bidirectional":
        found.append((f"{plan.pipeline.schedule} has its first stage on two ranks", "another schedule, such as 1f1b"))
    if layout.zero == 3 and not own:
        found.append(("frozen layers are whole on every rank, and zero3 shards parameters", "zero1, or none"))
    if plan.offload.any:
        found.append(("frozen layers stay on the device, and offload= moves state off it", "drop offload="))
    if plan.sync.policy != USUAL:
        found.append((f"sync={plan.sync.policy} is worked out without frozen layers beside it", "drop sync="))
    if model.tied_embeddings:
        found.append((f"the head of {model.name} is its embedding, which would be frozen", "another model"))
    if train.lora is not None:
        found.append(("adapters have a frozen base already", "drop phase=lora"))
    if train.packing:
        found.append(("documents make other microbatches in every step", "drop lengths= and pack="))
    if any(isinstance(model.block(layer).mlp, Moe) for layer in range(min(count, model.num_layers))):
        if plan.experts.ep > 1:
            found.append((f"ep={plan.experts.ep}: frozen experts of ranks that wait at other times", "say ep1"))
    if len(cluster.islands) > 1 or layout.shares or plan.kinds.any:
        found.append(("ranks on unequal devices wait in other ways", "an island of equal devices"))
    if cluster.shares_ports:
        found.append(("exchanges that share ports are worked out without them", "a cluster without shared_ports"))
    place = f"pipeline.filling = {way(plan)}" if own else f"pipeline.fill = {count}"
    for message, help in found:
        yield wrong("P079", message, place, help)


def nothing_frozen(plan: Plan, model: Model) -> Iterator[Diagnostic]:
    """Yield P079 for a plan that says where frozen layers go, of a model that has none."""
    if plan.pipeline.filling and not num_frozen(plan, model):
        said = plan.pipeline.filling
        help = f"drop filling={said}, or say which layers are frozen: fill_layers=N of the first N"
        message = f"{model.name} has no frozen layers to run ahead of a step"
        yield wrong("P079", message, f"pipeline.filling = {said}", help)
