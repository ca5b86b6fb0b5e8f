"""Layers priced once for all plans: equal sizes, groups and options are one context, whatever else the plans say.

A pass over a layer depends on a few facets only (tensor, context and expert parallelism and where their groups lie,
the microbatch, precision, kernels). Plans that agree on those share one :class:`Book` of layer costs; the rest of the
space (schedules, stages, sharding) is combined from them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.lower import state
from meshwright.lower.layer import program
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages, Unit
from meshwright.lower.step import Exchange, Key, Pass, Send, Update
from meshwright.plan import Plan
from meshwright.simulate.layer import CAUSE, CAUSES, LayerCost, cost
from meshwright.simulate.price import Pricer
from meshwright.spec.cluster import Cluster
from meshwright.spec.hardware import Device
from meshwright.spec.model import Model
from meshwright.spec.workload import Train


class Book:
    """Layer costs and activations of one context, filled in as they are asked for."""

    def __init__(self, stages: Stages, devices: dict[str, Device], costs: Costs):
        self.stages, self.devices, self.costs = stages, devices, costs
        self._costs: dict[tuple[Unit, str, str, int], LayerCost] = {}
        self._kept: dict[Unit, state.Activations] = {}
        #: Rows of seconds by cause of whole passes, kept by who asks for them.
        self.rows: dict = {}

    def unit(self, unit: Unit, which: str, device: str, start: int = 0) -> LayerCost:
        """One pass over one layer on a device, as `simulate.price.Pricer.unit` prices it."""
        key = (unit, which, device, start)
        found = self._costs.get(key)
        if found is None:
            entries = self.entries(unit, which, start)
            found = self._costs[key] = cost(entries, self.devices[device], self.costs)
        return found

    def entries(self, unit: Unit, which: str, start: int = 0):
        """The operators of a pass over a layer."""
        pieces = self.stages.pieces(unit.kind, start)
        return program(pieces, which, recompute=unit.recompute, overlap_tp=self.stages.plan.overlap.tp)

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


class SharedPricer(Pricer):
    """The pricer of a plan: layers and whole passes are looked up in the book that it shares with others."""

    def __init__(self, stages: Stages, mesh: Mesh, costs: Costs, book: Book):
        super().__init__(_Lowered(stages=stages, mesh=mesh), costs)
        self._book = book

    def unit(self, unit: Unit, which: str, device: str, start: int) -> LayerCost:
        return self._book.unit(unit, which, device, start)

    def row(self, key: Key) -> np.ndarray:
        """Seconds by cause [len(CAUSES)] of one cost key, to the last bit what :meth:`Pricer.all` says."""
        if isinstance(key, Pass) and not key.beside:
            found = self._book.rows.get(key)
            if found is None:
                found = self._book.rows[key] = self._alone(key)
            return found
        if isinstance(key, Pass):
            alone = self.row(msgspec.structs.replace(key, beside=()))
            out = alone.copy()
            out[CAUSE["dp"]] += self._slowed(key, float(alone.sum()))
            return out
        out = np.zeros(len(CAUSES))
        match key:
            case Send():
                out[CAUSE["pp"]] = self._send(key)
            case Exchange():
                out[CAUSE["dp"]] = self.exchange(key)
            case Update():
                out[CAUSE["optimizer"]] = self._update(key)
        return out

    def _alone(self, key: Pass) -> np.ndarray:
        """A pass with nothing beside it: its units one after the other, and the host's time per pass."""
        out = np.zeros(len(CAUSES))
        for unit in key.units:
            out += self.unit(unit, key.which, key.device, key.start).parts
        out[CAUSE["host"]] += self.costs.framework.host_us_per_pass * 1e-6 * key.share
        return out


class Layers:
    """The books of one question (model, cluster, workload, costs)."""

    def __init__(self, model: Model, cluster: Cluster, train: Train, costs: Costs):
        self.model, self.cluster, self.train, self.costs = model, cluster, train, costs
        self.devices = {island.device.name: island.device for island in cluster.islands}
        self._books: dict[tuple, Book] = {}
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
        key = (
            layout.tp,
            layout.cp,
            layout.sp and layout.tp > 1,
            plan.pipeline.microbatch,
            plan.sequence if layout.cp > 1 else None,
            plan.experts,
            plan.precision,
            plan.memory.attention,
            plan.overlap.tp,
            groups,
        )
        found = self._books.get(key)
        if found is None:
            found = self._books[key] = Book(Stages(plan, self.model, self.train, mesh), self.devices, self.costs)
        return found

    def stages(self, plan: Plan, mesh: Mesh) -> Stages:
        """The plan's stages; counts of parameters are shared between plans that split them alike."""
        stages = Stages(plan, self.model, self.train, mesh)
        stages._params = self._params.setdefault((plan.layout.tp, plan.experts, plan.layout.pp == 1), stages._params)
        return stages
