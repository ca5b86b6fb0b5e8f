"""Durations beside the graph: every distinct cost key of a lowered plan, in seconds by cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import msgspec
import numpy as np

from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs, Estimate
from meshwright.cost.roofline import contention
from meshwright.lower import Lowered
from meshwright.lower.exchange import exchange_of
from meshwright.lower.layer import Entry, program
from meshwright.lower.stages import Unit
from meshwright.lower.state import STORED_BYTES
from meshwright.lower.step import Exchange, Pass, Send, Update, gathers_again
from meshwright.plan import Plan
from meshwright.simulate.layer import HOST_SIGMA, LayerCost, cost
from meshwright.spec.hardware import Device
from meshwright.spec.workload import OPTIMIZER_MOMENTS, Train
from meshwright.work import Collective, Elementwise, Group, Staging


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """``parts`` [num_keys, len(PRICED)] seconds; ``spread`` those times the relative error of their estimates;
    ``flops`` [num_keys] operations executed, ``repeated`` those of them that recompute; ``wait`` [num_keys] seconds in
    which the device is free for other ranks."""

    parts: np.ndarray
    spread: np.ndarray
    flops: np.ndarray
    repeated: np.ndarray
    wait: np.ndarray

    @property
    def durations(self) -> np.ndarray:
        return self.parts.sum(axis=1)


def _narrowed(group: Group, share: float) -> Group:
    """The same ranks with a share of the bandwidth between nodes."""
    hops = tuple(msgspec.structs.replace(h, gb_s=h.gb_s * share) if h.scale_out else h for h in group.hops)
    return msgspec.structs.replace(group, hops=hops)


class Pricer:
    """Prices the keys of one lowered plan; layers are simulated once per kind, pass, mode and device."""

    def __init__(self, lowered: Lowered, costs: Costs):
        self.lowered, self.costs = lowered, costs
        self.stages, self.plan = lowered.stages, lowered.stages.plan
        self.devices: dict[str, Device] = {d.name: d for s in lowered.mesh.slices for d in s.devices}
        self._units: dict[tuple[Unit, str, str, int], LayerCost] = {}
        self._sends: dict[Send, tuple[float, float, float]] = {}

    def all(self) -> Priced:
        shape = (len(self.lowered.keys), len(PRICED))
        parts, spread = np.zeros(shape), np.zeros(shape)
        flops, repeated, wait = np.zeros(shape[0]), np.zeros(shape[0]), np.zeros(shape[0])
        for i, key in enumerate(self.lowered.keys):
            match key:
                case Pass():
                    flops[i], repeated[i], wait[i] = self._pass(key, parts[i], spread[i])
                case Send():
                    parts[i, CAUSE["pp"]], spread[i, CAUSE["pp"]], wait[i] = self._send(key)
                case Exchange():
                    parts[i, CAUSE["dp"]], spread[i, CAUSE["dp"]], wait[i] = self.exchange(key)
                case Update():
                    estimate = self._update(key)
                    parts[i, CAUSE["optimizer"]] = estimate.seconds
                    spread[i, CAUSE["optimizer"]] = estimate.seconds * estimate.sigma
        return Priced(parts=parts, spread=spread, flops=flops, repeated=repeated, wait=wait)

    def _pass(self, key: Pass, parts: np.ndarray, spread: np.ndarray) -> tuple[float, float, float]:
        """Fill one pass's row; the operations it executes, those of them it repeats, and seconds it waits."""
        flops = repeated = wait = 0.0
        for unit in key.units:
            one = self.unit(unit, key.which, key.device, key.start)
            parts += one.parts
            spread += one.spread
            flops += one.flops
            repeated += one.repeated
            wait += one.wait
        host = self.costs.framework.host_us_per_pass * 1e-6 * key.share
        parts[CAUSE["host"]] += host
        spread[CAUSE["host"]] += host * HOST_SIGMA
        slowed, uncertain = self._slowed(key, float(parts.sum()))
        parts[CAUSE["dp"]] += slowed
        spread[CAUSE["dp"]] += uncertain
        self._stage(key, parts, spread)
        return flops, repeated, wait

    def _stage(self, key: Pass, parts: np.ndarray, spread: np.ndarray) -> None:
        """Copies around the exchanges of fully sharded parameters."""
        if not gathers_again(self.plan.layout):
            return
        for what in key.beside:
            exchange = exchange_of(self.stages, self.lowered.mesh, key.units, what, key.start)
            for _, size, _ in exchange.steps[:1]:
                found = self.costs.price(Staging(what=what, num_bytes=size), self.devices[key.device])
                parts[CAUSE["host"]] += found.seconds
                spread[CAUSE["host"]] += found.seconds * found.sigma

    def unit(self, unit: Unit, which: str, device: str, start: int) -> LayerCost:
        """One pass over one layer on a device."""
        key = (unit, which, device, start)
        found = self._units.get(key)
        if found is None:
            entries = self.entries(unit, which, start)
            found = self._units[key] = cost(entries, which, self.devices[device], self.costs, self.lag(device))
        return found

    def lag(self, device: str) -> float:
        """Time of the slowest of a step's devices over a middling one's: all ranks wait for one another."""
        return self.devices[device].slowest_of(self.plan.layout.num_ranks)

    def entries(self, unit: Unit, which: str, start: int) -> list[Entry]:
        """The operators of one pass over one layer; kept with the stages, as they do not depend on costs."""
        known = self.stages.programs
        if (unit, which, start) not in known:
            pieces = self.stages.pieces(unit.kind, start)
            overlap = self.plan.overlap
            known[unit, which, start] = program(pieces, which, recompute=unit.recompute, overlap=overlap)
        return known[unit, which, start]

    def exchange(self, key: Exchange) -> tuple[float, float, float]:
        """Seconds of some collectives one after the other, those times their relative errors, and those they wait."""
        framework = self.costs.framework
        zero = self.plan.layout.zero
        share = framework.exchange_share if zero == 3 else 1.0
        bucket = framework.defaults.bucket_bytes if zero == 0 else 0
        works, times = [], []
        for op, size, group in key.steps:
            times.append(ceil(size / bucket) if bucket and op == "all_reduce" else 1)
            group = group if share == 1.0 else _narrowed(group, share)
            works.append(Collective(op=op, num_bytes=size / times[-1], group=group))
        return self._sum(works, times)

    def _sum(self, works: Iterable[Collective], times: Sequence[int] = ()) -> tuple[float, float, float]:
        """Seconds of some collectives, each so many times (once)."""
        device = next(iter(self.devices.values()))
        found = [self.costs.price(work, device) for work in works]
        weighed = list(zip(found, times or (1,) * len(found), strict=True))
        return (
            sum(e.seconds * n for e, n in weighed),
            sum(e.seconds * e.sigma * n for e, n in weighed),
            sum(e.wait * n for e, n in weighed),
        )

    def _slowed(self, key: Pass, seconds: float) -> tuple[float, float]:
        """What a pass loses to the exchanges beside it, which take SMs while they run. Processor cores are shared in
        time instead (``simulate/cores.py``)."""
        if not key.beside or self.devices[key.device].cores:
            return 0.0, 0.0
        mesh = self.lowered.mesh
        found = [self.exchange(exchange_of(self.stages, mesh, key.units, what, key.start)) for what in key.beside]
        beside, uncertain = sum(s for s, _, _ in found), sum(u for _, u, _ in found)
        lost = min(beside, seconds) * contention(self.devices[key.device])
        return lost, lost * (uncertain / beside if beside else 0.0)

    def _send(self, key: Send) -> tuple[float, float, float]:
        """A stage's output: each tensor-parallel rank sends its share, gathered again on arrival where the layer
        does not keep the sequence sharded (Narayanan et al. 2104.04473, section 4.1)."""
        found = self._sends.get(key)
        if found is not None:
            return found
        c = self.stages.context()
        size = c.tokens * c.model.hidden * c.element / c.tp
        works = [Collective(op="send", num_bytes=size, group=key.group)]
        if c.tp > 1 and not c.sp:
            works.append(Collective(op="all_gather", num_bytes=size * c.tp, group=c.tp_group))
        found = self._sends[key] = self._sum(works)
        return found

    def _update(self, key: Update) -> Estimate:
        size = key.params * updated_bytes(self.plan, self.stages.train)
        work = Elementwise(num_bytes=size, kernels=8, fused=True, operator="optimizer")
        found = self.costs.price(work, self.devices[key.device])
        return found._replace(seconds=found.seconds * self.lag(key.device))


def updated_bytes(plan: Plan, train: Train) -> float:
    """Bytes an update moves for each parameter: one pass over gradients for their norm, one fused pass that reads
    gradient, master and moments and writes master, moments and the working parameter."""
    precision = plan.precision
    compute = precision.compute or train.dtype
    master = 4.0 if compute == "fp32" else STORED_BYTES[precision.master] or 2.0
    moments = OPTIMIZER_MOMENTS[train.optimizer] * STORED_BYTES[precision.moments]
    grads = STORED_BYTES[precision.grads]
    return grads + grads + 2 * (master + moments) + (0.0 if compute == "fp32" else 2.0)
