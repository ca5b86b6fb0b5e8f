"""Training beside serving: a job has the devices that serving leaves free, hour by hour, or those it never needs.

The job takes whole nodes. Each number of them is searched for its fastest plan, and where its number changes the job
stops, takes up its checkpoint with other devices and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.search.find import find
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_part import cut
from meshwright.spec.model import Model
from meshwright.spec.serving_day import HOUR_S
from meshwright.spec.workload import Train


class TrainedOn(NamedTuple):
    """The fastest training plan on so many devices, and the tokens a second it trains; "" and 0 where none fits."""

    devices: int
    plan: str
    tokens_per_s: float


class TrainingBeside(msgspec.Struct, frozen=True, kw_only=True):
    """A training job beside a day of serving: the devices that it has hour by hour, the tokens it trains
    (``tokens``), how often it is restarted, and the tokens that it would train on the devices that a fixed number of
    replicas leaves all day (``tokens_apart``)."""

    devices: tuple[int, ...]
    plans: tuple[TrainedOn, ...]
    tokens: float
    restarts: int
    tokens_apart: float
    devices_apart: int

    def to_json(self) -> dict[str, Any]:
        """The job as plain values."""
        return {
            "devices": list(self.devices),
            "plans": [one._asdict() for one in self.plans],
            "tokens": self.tokens,
            "restarts": self.restarts,
            "tokens_apart": self.tokens_apart,
            "devices_apart": self.devices_apart,
        }


def trained_beside(
    model: Model, cluster: Cluster, train: Train, scaled: Sequence[int], fixed: Sequence[int], restart_s: float
) -> TrainingBeside:
    """Return what a training job gets of a cluster on which serving holds so many devices in each hour: `scaled` as it
    is, and `fixed` where the number of replicas does not change."""
    known: dict[int, TrainedOn] = {0: TrainedOn(0, "", 0.0)}

    def on(held: int) -> TrainedOn:
        free = (cluster.num_devices - held) // _node(cluster) * _node(cluster)
        while free > 0:
            if free not in known:
                known[free] = _trained(model, cut(cluster, 0, free), train)
            if known[free].plan:
                return known[free]
            free -= _node(cluster)  # nothing fits, or divides the batch: leave a node free
        return known[0]

    hours = [on(held) for held in scaled]
    apart = on(max(fixed))
    tokens, restarts, before = 0.0, 0, None
    for one in hours:
        changed = before is not None and before.devices != one.devices
        restarts += changed and one.devices > 0
        tokens += one.tokens_per_s * max(0.0, HOUR_S - (restart_s if changed else 0.0))
        before = one
    return TrainingBeside(
        devices=tuple(one.devices for one in hours),
        plans=tuple(sorted({one for one in (*hours, apart) if one.devices})),
        tokens=tokens,
        restarts=restarts,
        tokens_apart=apart.tokens_per_s * HOUR_S * len(hours),
        devices_apart=apart.devices,
    )


def _node(cluster: Cluster) -> int:
    return min(cluster.islands[0].devices_per_node, cluster.num_devices)


def _trained(model: Model, cluster: Cluster, train: Train) -> TrainedOn:
    """The fastest plan of a training step on a cluster."""
    try:
        found = find(model, cluster, train, top=1)
    except MeshwrightError as error:
        if any(d.code != "R005" for d in error.diagnostics):
            raise
        return TrainedOn(cluster.num_devices, "", 0.0)
    if not found.best:
        return TrainedOn(cluster.num_devices, "", 0.0)
    best = found.best[0].prediction
    return TrainedOn(cluster.num_devices, best.plan.text(), best.tokens_per_s_per_gpu * cluster.num_devices)
