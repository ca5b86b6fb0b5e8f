"""Durations beside the graph: every distinct cost key of a lowered plan, in seconds by cause."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.cost import Costs
from meshwright.cost.roofline import contention
from meshwright.lower import Lowered
from meshwright.lower.exchange import exchange_of
from meshwright.lower.layer import Entry, program
from meshwright.lower.stages import Unit
from meshwright.lower.state import STORED_BYTES
from meshwright.lower.step import Exchange, Pass, Send, Update
from meshwright.simulate.layer import CAUSE, CAUSES, LayerCost, cost
from meshwright.spec.hardware import Device
from meshwright.spec.workload import OPTIMIZER_MOMENTS
from meshwright.work import Collective, Elementwise


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """``parts`` [num_keys, len(CAUSES)] seconds; ``flops`` [num_keys] operations executed."""

    parts: np.ndarray
    flops: np.ndarray

    @property
    def durations(self) -> np.ndarray:
        return self.parts.sum(axis=1)


class Pricer:
    """Prices the keys of one lowered plan; layers are simulated once per kind, pass, mode and device."""

    def __init__(self, lowered: Lowered, costs: Costs):
        self.lowered, self.costs = lowered, costs
        self.stages, self.plan = lowered.stages, lowered.stages.plan
        self.devices: dict[str, Device] = {d.name: d for s in lowered.mesh.slices for d in s.devices}
        self._units: dict[tuple[Unit, str, str, int], LayerCost] = {}

    def all(self) -> Priced:
        parts = np.zeros((len(self.lowered.keys), len(CAUSES)))
        flops = np.zeros(len(self.lowered.keys))
        for i, key in enumerate(self.lowered.keys):
            match key:
                case Pass():
                    for unit in key.units:
                        one = self.unit(unit, key.which, key.device, key.start)
                        parts[i] += one.parts
                        flops[i] += one.flops
                    parts[i, CAUSE["host"]] += self.costs.framework.host_us_per_pass * 1e-6 * key.share
                    parts[i, CAUSE["dp"]] += self._slowed(key, float(parts[i].sum()))
                case Send():
                    parts[i, CAUSE["pp"]] = self._send(key)
                case Exchange():
                    parts[i, CAUSE["dp"]] = self.exchange(key)
                case Update():
                    parts[i, CAUSE["optimizer"]] = self._update(key)
        return Priced(parts=parts, flops=flops)

    def unit(self, unit: Unit, which: str, device: str, start: int) -> LayerCost:
        """One pass over one layer on a device."""
        key = (unit, which, device, start)
        found = self._units.get(key)
        if found is None:
            entries = self.entries(unit, which, start)
            found = self._units[key] = cost(entries, self.devices[device], self.costs)
        return found

    def entries(self, unit: Unit, which: str, start: int) -> list[Entry]:
        """The operators of one pass over one layer; kept with the stages, as they do not depend on costs."""
        known = self.stages.programs
        if (unit, which, start) not in known:
            pieces = self.stages.pieces(unit.kind, start)
            overlap = self.plan.overlap.tp
            known[unit, which, start] = program(pieces, which, recompute=unit.recompute, overlap_tp=overlap)
        return known[unit, which, start]

    def exchange(self, key: Exchange) -> float:
        return sum(self.collective(Collective(op=op, num_bytes=size, group=group)) for op, size, group in key.steps)

    def _slowed(self, key: Pass, seconds: float) -> float:
        """What a pass loses to the exchanges beside it, which take SMs while they run."""
        if not key.beside:
            return 0.0
        mesh = self.lowered.mesh
        beside = sum(self.exchange(exchange_of(self.stages, mesh, key.units, what)) for what in key.beside)
        return min(beside, seconds) * contention(self.devices[key.device])

    def collective(self, work: Collective) -> float:
        return self.costs.price(work, next(iter(self.devices.values()))).seconds

    def _send(self, key: Send) -> float:
        """A stage's output: each tensor-parallel rank sends its share, gathered again on arrival where the layer
        does not keep the sequence sharded (Narayanan et al. 2104.04473, section 4.1)."""
        c = self.stages.context()
        size = c.tokens * c.model.hidden * c.element / c.tp
        seconds = self.collective(Collective(op="send", num_bytes=size, group=key.group))
        if c.tp > 1 and not c.sp:
            seconds += self.collective(Collective(op="all_gather", num_bytes=size * c.tp, group=c.tp_group))
        return seconds

    def _update(self, key: Update) -> float:
        """One pass over gradients for their norm, one fused pass that reads gradient, master and moments and writes
        master, moments and the working parameter."""
        precision, train = self.plan.precision, self.stages.train
        compute = precision.compute or train.dtype
        master = 4.0 if compute == "fp32" else STORED_BYTES[precision.master] or 2.0
        moments = OPTIMIZER_MOMENTS[train.optimizer] * STORED_BYTES[precision.moments]
        grads = STORED_BYTES[precision.grads]
        per_param = grads + grads + 2 * (master + moments) + (0.0 if compute == "fp32" else 2.0)
        work = Elementwise(num_bytes=key.params * per_param, kernels=8, fused=True)
        return self.costs.price(work, self.devices[key.device]).seconds
