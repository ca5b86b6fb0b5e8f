"""Layers priced once for all plans: equal sizes, groups and options are one context, whatever else the plans say.

A pass over a layer depends on a few facets only (tensor, context and expert parallelism and where their groups lie,
the microbatch, precision, kernels). Plans that agree on those share one :class:`Book` of layer costs; the rest of the
space (schedules, stages, sharding) is combined from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from meshwright.cost import Costs
from meshwright.lower import state
from meshwright.lower.layer import program
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages, Unit
from meshwright.lower.step import Key, Pass
from meshwright.plan import Plan
from meshwright.simulate.layer import LayerCost, cost
from meshwright.simulate.price import Pricer
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Device
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: Passes that recompute nothing: they are the same under every recompute mode.
_NEVER_AGAIN = ("F", "W")


@cache
def _plain(kind: int | str) -> Unit:
    return Unit(kind, "none")


class Book:
    """Layer costs and activations of one context, filled in as they are asked for."""

    def __init__(self, stages: Stages, devices: dict[str, Device], costs: Costs, ends: dict, near: dict):
        self.stages, self.devices, self.costs = stages, devices, costs
        #: Costs by the groups that a rank is in, shared with books of the same sizes on other layouts.
        self._near = near
        #: Costs of the embedding and the head, shared with other books.
        self._ends = ends
        self._costs: dict[tuple[Unit, str, str, int], LayerCost] = {}
        self._kept: dict[Unit, state.Activations] = {}
        #: Rows of seconds by cause of whole passes, kept by who asks for them.
        self.rows: dict = {}

    def unit(self, unit: Unit, which: str, device: str, start: int = 0) -> LayerCost:
        """One pass over one layer on a device, as `simulate.price.Pricer.unit` prices it."""
        if which in _NEVER_AGAIN:
            unit = _plain(unit.kind)
        key = (unit, which, device, start)
        known = self._ends if isinstance(unit.kind, str) else self._costs
        found = known.get(key)
        if found is None:
            alike = (unit, which, device, *self.stages.context(start).groups)
            found = self._near.get(alike)
            if found is None:
                entries = self.entries(unit, which, start)
                lag = self.devices[device].slowest_of(self.stages.plan.layout.num_ranks)
                found = self._near[alike] = cost(entries, which, self.devices[device], self.costs, lag)
            known[key] = found
        return found

    def entries(self, unit: Unit, which: str, start: int = 0):
        """The operators of a pass over a layer."""
        pieces = self.stages.pieces(unit.kind, start)
        return program(pieces, which, recompute=unit.recompute, overlap=self.stages.plan.overlap)

    def activations(self, unit: Unit) -> state.Activations:
        """Bytes one microbatch leaves in a layer."""
        found = self._kept.get(unit)
        if found is None:
            pieces = self.stages.pieces(unit.kind)
            found = self._kept[unit] = state.activations(self.stages.context(), pieces, unit.recompute)
        return found


class _Lowered(NamedTuple):
    """As much of a lowered plan as a pricer reads."""

    stages: Stages
    mesh: Mesh
    keys: Sequence[Key]


class SharedPricer(Pricer):
    """The pricer of some keys of a plan: layers and whole passes are looked up in the book it shares with others."""

    def __init__(self, stages: Stages, mesh: Mesh, costs: Costs, book: Book | None, keys: Sequence[Key]):
        super().__init__(_Lowered(stages=stages, mesh=mesh, keys=keys), costs)
        self._book = book

    def unit(self, unit: Unit, which: str, device: str, start: int) -> LayerCost:
        return self._book.unit(unit, which, device, start)

    def _pass(self, key: Pass, parts: np.ndarray, spread: np.ndarray) -> float:
        if key.beside:  # what runs beside it is the plan's own
            return super()._pass(key, parts, spread)
        found = self._book.rows.get(key)
        if found is None:
            flops = super()._pass(key, parts, spread)
            self._book.rows[key] = (parts.copy(), spread.copy(), flops)
            return flops
        parts[:], spread[:] = found[:2]
        return found[2]


class Layers:
    """The books of one question (model, cluster, workload, costs)."""

    def __init__(self, model: Model, cluster: Cluster, train: Train, costs: Costs):
        self.model, self.cluster, self.train, self.costs = model, cluster, train, costs
        self.devices = {island.device.name: island.device for island in cluster.islands}
        self._books: dict[tuple, Book] = {}
        self._ends: dict[tuple, dict] = {}
        self._near: dict[tuple, dict] = {}
        self._groups: dict[int, dict] = {}
        self._params: dict[tuple, dict] = {}

    def mesh(self, plan: Plan) -> Mesh:
        """The plan's mesh; groups are shared between meshes of as many ranks."""
        mesh = Mesh(plan, self.cluster)
        mesh._groups = self._groups.setdefault(mesh.num_ranks, mesh._groups)
        return mesh

    def book(self, plan: Plan, mesh: Mesh) -> Book:
        """The layer costs that this plan shares with others."""
        layout = plan.layout
        groups: tuple = (mesh.group("tp"), mesh.group("cp"), mesh.expert_group("ep"), mesh.expert_group("etp"))
        if len(self.cluster.islands) > 1:  # ranks are not alike: what their neighbours are depends on the whole layout
            groups += (layout.order, layout.pp, layout.dp)
        sizes = (
            layout.tp,
            layout.cp,
            layout.sp and layout.tp > 1,
            plan.pipeline.microbatch,
            plan.sequence if layout.cp > 1 else None,
            plan.experts,
            plan.precision,
            plan.memory.attention,
            plan.memory.loss,
            plan.overlap.tp,
            plan.overlap.ep,
        )
        key = (sizes, groups)
        found = self._books.get(key)
        if found is None:
            stages = Stages(plan, self.model, self.train, mesh)
            near = self._near.setdefault(sizes, {})
            found = self._books[key] = Book(stages, self.devices, self.costs, self._shared_ends(stages), near)
        return found

    def _shared_ends(self, stages: Stages) -> dict:
        """What the embedding and the head cost, shared by books in which as many tokens meet equal shares of them."""
        if len(self.cluster.islands) > 1:
            return {}
        c = stages.context()
        same = (c.tokens, c.tp, c.sp, c.tp_group, c.plan.precision, c.plan.memory.loss, c.plan.overlap.tp)
        return self._ends.setdefault(same, {})

    def stages(self, plan: Plan, mesh: Mesh) -> Stages:
        """The plan's stages; counts of parameters are shared between plans that split them alike."""
        stages = Stages(plan, self.model, self.train, mesh)
        key = (plan.layout.tp, plan.experts, stages.ends_meet)
        stages._params = self._params.setdefault(key, stages._params)
        return stages
