"""Durations beside the graph: every program of a lowered plan, in seconds by cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs
from meshwright.cost.roofline import contention
from meshwright.lower.program import LayerPass, Move, Program, Site
from meshwright.simulate.layer import LayerCost, cost, sigma_of_host
from meshwright.work import HOST_REDUCE, Collective, Group, Staging

#: The program of a rank's update.
OPTIMIZER = "optimizer"
#: What measured tables call what surrounds the update of a step.
STEP = "step"


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


class ProgramPrice(NamedTuple):
    """One program's row of :class:`Priced`."""

    parts: np.ndarray
    spread: np.ndarray
    flops: float = 0.0
    repeated: float = 0.0
    wait: float = 0.0

    @property
    def seconds(self) -> float:
        return float(self.parts.sum())


class Moved(NamedTuple):
    """The price of several collectives in a row, in seconds: their time, the sum of each time times its relative error,
    and ``wait``, the part of the time in which the device is free for other ranks."""

    seconds: float
    spread: float
    wait: float


def _narrowed(group: Group, share: float) -> Group:
    """Return the group of the same ranks with a share of the bandwidth between nodes."""
    hops = tuple(msgspec.structs.replace(h, gb_s=h.gb_s * share) if h.scale_out else h for h in group.hops)
    return msgspec.structs.replace(group, hops=hops)


class Pricer:
    """Prices programs, each layer's pass once for a device and each whole pass once."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self._layers: dict[tuple[LayerPass, str, int], LayerCost] = {}
        self._passes: dict[Program, ProgramPrice] = {}

    def all(self, programs: Sequence[Program]) -> Priced:
        """The prices of all programs of a graph, in their order."""
        rows = [self(program) for program in programs]
        return Priced(
            parts=np.array([row.parts for row in rows]).reshape(len(rows), len(PRICED)),
            spread=np.array([row.spread for row in rows]).reshape(len(rows), len(PRICED)),
            flops=np.array([row.flops for row in rows]),
            repeated=np.array([row.repeated for row in rows]),
            wait=np.array([row.wait for row in rows]),
        )

    def __call__(self, program: Program) -> ProgramPrice:
        """The price of one program."""
        if program.kind == "pass":
            found = self._passes.get(program)
            if found is None:
                found = self._passes[program] = self._pass(program)
            return found
        parts, spread = np.zeros(len(PRICED)), np.zeros(len(PRICED))
        if program.kind == "update" and self.costs.outside_s is not None:
            parts[CAUSE["optimizer"]] = self.costs.outside_s if program.name == OPTIMIZER else 0.0
            return ProgramPrice(parts, spread)
        if program.kind == "update":
            self._update(program, parts, spread)
            return ProgramPrice(parts, spread)
        if program.kind == "transfer":
            work = program.work
            if work.saved:
                work = msgspec.structs.replace(work, num_bytes=work.num_bytes * self.costs.framework.activation_copies)
            estimate = self.costs.price(work, program.site.device)
            parts[CAUSE["offload"]] = estimate.seconds
            spread[CAUSE["offload"]] = estimate.seconds * estimate.sigma
            if program.which == "update":
                host = self.costs.framework.host_us_per_step * 1e-6 * program.share
                parts[CAUSE["host"]] += host
                spread[CAUSE["host"]] += host * sigma_of_host(self.costs.framework)
            return ProgramPrice(parts, spread)
        cause = CAUSE["pp" if program.kind == "send" else "dp"]
        parts[cause], spread[cause], wait = self.moved(program)
        return ProgramPrice(parts, spread, wait=wait)

    def _update(self, program: Program, parts: np.ndarray, spread: np.ndarray) -> None:
        """Add an optimizer's or a code's work to seconds by cause, an optimizer's with the host's time of a step."""
        if program.kind == "update" and program.name == OPTIMIZER:
            host = self.costs.framework.host_us_per_step * 1e-6 * program.share
            parts[CAUSE["host"]] += host
            spread[CAUSE["host"]] += host * sigma_of_host(self.costs.framework)
            around = self.costs.price(Staging(what=STEP, num_bytes=program.work.num_bytes), program.site.device)
            parts[CAUSE["host"]] += around.seconds * program.site.straggling
            spread[CAUSE["host"]] += around.seconds * around.sigma
        for work in (program.work, *program.products):
            estimate = self.costs.price(work, program.site.device)
            seconds = estimate.seconds * program.site.straggling
            parts[CAUSE["optimizer"]] += seconds
            spread[CAUSE["optimizer"]] += seconds * estimate.sigma

    def layer(self, one: LayerPass, site: Site) -> LayerCost:
        """One pass over one layer on a device."""
        key = (one, site.device.name, site.num_ranks)
        found = self._layers.get(key)
        if found is None:
            found = cost(one.entries, one.which, site.device, self.costs, site.straggling)
            self._layers[key] = found
        return found

    def moved(self, program: Program) -> Moved:
        """The collectives of a program, on the framework's share of the links."""
        found = [self._message(move, program.site) for move in program.moves]
        coding = spread = 0.0
        if program.work is not None:
            estimate = self.costs.price(program.work, program.site.device)
            coding, spread = estimate.seconds, estimate.seconds * estimate.sigma
        return Moved(
            coding + sum(e.seconds * move.times for e, move in zip(found, program.moves)),
            spread + sum(e.seconds * e.sigma * move.times for e, move in zip(found, program.moves)),
            sum(e.wait * move.times for e, move in zip(found, program.moves)),
        )

    def _message(self, move: Move, site: Site):
        framework = self.costs.framework
        share = {"layers": framework.exchange_share, "late": framework.gather_share}.get(move.sharded, 1.0)
        group = move.group if share == 1.0 else _narrowed(move.group, share)
        work = Collective(op=move.op, num_bytes=move.num_bytes / move.times, group=group)
        return self.costs.price(work, site.device)

    def _pass(self, program: Program) -> ProgramPrice:
        site = program.site
        layers = [self.layer(one, site) for one in program.layers]
        parts, spread = np.zeros(len(PRICED)), np.zeros(len(PRICED))
        flops = repeated = wait = 0.0
        for one in layers:
            parts += one.parts
            spread += one.spread
            flops += one.flops
            repeated += one.repeated
            wait += one.wait
        # the last layer's exchange has no next layer to hide behind; a part of a stage's pass has its part of that
        parts[CAUSE["tp"]] += max((one.drain for one in layers), default=0.0) * program.share
        host = self.costs.framework.host_us_per_pass * 1e-6 * program.share
        parts[CAUSE["host"]] += host
        spread[CAUSE["host"]] += host * sigma_of_host(self.costs.framework)
        slowed, uncertain = self._slowed(program, float(parts.sum()))
        parts[CAUSE["dp"]] += slowed
        spread[CAUSE["dp"]] += uncertain
        for copy in program.copies:
            found = self.costs.price(copy, site.device)
            parts[CAUSE["host"]] += found.seconds
            spread[CAUSE["host"]] += found.seconds * found.sigma
        if program.work is not None:
            self._update(program, parts, spread)
        return ProgramPrice(parts, spread, flops, repeated, wait)

    def _slowed(self, program: Program, seconds: float) -> tuple[float, float]:
        """Seconds that a pass loses to the exchanges overlapped with it, which take SMs, and those times their
        relative error. Processor cores are shared in time instead (``simulate/cores.py``)."""
        device = program.site.device
        # copy engines and the host's cores make the sums of hosts, and take nothing from kernels
        beside = [one for one in program.beside if any(move.op != HOST_REDUCE for move in one.moves)]
        if not beside or device.cores:
            return 0.0, 0.0
        found = [self.moved(one) for one in beside]
        busy, uncertain = sum(one.seconds for one in found), sum(one.spread for one in found)
        lost = min(busy, seconds) * contention(device)
        return lost, lost * (uncertain / busy if busy else 0.0)
