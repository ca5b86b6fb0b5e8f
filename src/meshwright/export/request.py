"""Requests to an exporter: model, cluster, workload and a legal plan with every axis filled in, and what follows."""

from __future__ import annotations

import msgspec

from meshwright.lower.partition import even
from meshwright.plan import Layout, Plan
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The four nouns of a question; ``plan.layout.dp`` is filled in."""

    model: Model
    cluster: Cluster
    train: Train
    plan: Plan

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def world(self) -> int:
        """Ranks, one process each."""
        return self.layout.num_ranks

    @property
    def compute(self) -> str:
        """Precision of the matrix multiplications: the plan's, else the workload's."""
        return self.plan.precision.compute or self.train.dtype

    @property
    def num_microbatches(self) -> int:
        return self.plan.num_microbatches(self.train.global_batch)

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of every virtual stage, in stage order."""
        return self.layout.stages or even(self.model.num_layers, self.plan.num_stages)

    @property
    def has_experts(self) -> bool:
        return bool(self.model.mixtures)

    @property
    def devices_per_node(self) -> int:
        """Devices on a host of the first island; :func:`meshwright.export.limits.nodes` asks that all agree."""
        return self.cluster.islands[0].devices_per_node

    @property
    def processes_per_node(self) -> int:
        return min(self.world, self.devices_per_node)

    @property
    def num_nodes(self) -> int:
        return -(-self.world // self.devices_per_node)

    @property
    def num_steps(self) -> int:
        """Optimizer steps for the workload's tokens, 0 when it does not say."""
        return -(-int(self.train.tokens) // self.train.tokens_per_step)

    @property
    def name(self) -> str:
        """The question in a line, for headers: no name in it ends a comment or a docstring."""
        line = f"{self.model.name} on {self.cluster.name}, {self.train.text()}, plan {self.plan.text()}"
        return "".join(c if c.isprintable() and c not in '"\\' else "_" for c in line)
