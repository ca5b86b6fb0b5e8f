"""Legality of frozen layers that fill the waits of a pipeline (``fill_layers=``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from meshwright import schedules
from meshwright.errors import Diagnostic
from meshwright.plan.facet import wrong
from meshwright.spec.layers import Moe
from meshwright.spec.parts import part_of
from meshwright.sync.record import USUAL

if TYPE_CHECKING:
    from meshwright.plan.record import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import Train


def without_frozen(plan: Plan) -> Plan:
    """The plan of the layers that are trained."""
    return msgspec.structs.replace(plan, pipeline=msgspec.structs.replace(plan.pipeline, fill=0))


def trained_part(plan: Plan, model: Model) -> Model:
    """The layers that are trained, as a model."""
    return part_of(model, plan.pipeline.fill, model.num_layers)


def rules(plan: Plan, model: Model, cluster: Cluster, train: Train) -> Iterator[Diagnostic]:
    """Yield P079 for everything that keeps a model's first layers from being run in the waits of a pipeline."""
    count, layout, found = plan.pipeline.fill, plan.layout, []
    if count >= model.num_layers:
        found.append(
            (
                f"{count} frozen layers leave none of {model.name}'s {model.num_layers} to train",
                "a smaller fill_layers=",
            )
        )
    if layout.pp == 1:
        found.append(("a plan without a pipeline has no waits to fill", "say pp2 or more, or a pool that is frozen"))
    if schedules.get(plan.pipeline.schedule).placement == "bidirectional":
        found.append((f"{plan.pipeline.schedule} has its first stage on two ranks", "another schedule, such as 1f1b"))
    if layout.zero == 3:
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
    for message, help in found:
        yield wrong("P079", message, f"pipeline.fill = {count}", help)
