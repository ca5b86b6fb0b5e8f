"""Glances: what layers cost at least, at once and without pricing any: kernels, and collectives that layers wait for.

No layer is simulated, so a region that a glance rules out needs no price of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from meshwright.lower.layer import Entry
from meshwright.lower.stages import Unit
from meshwright.plan import Experts, Layout, Plan
from meshwright.search.columns import Alone, Costs, spread, waited_for
from meshwright.search.evaluate import Evaluator
from meshwright.search.space import Core, Inner, bare
from meshwright.spec.hardware import Device
from meshwright.work import Collective, Group

PASSES = ("F", "BW", "B", "W")


class Glances:
    """Glances at the regions of one question."""

    def __init__(self, evaluator: Evaluator):
        self.evaluator, self.layers = evaluator, evaluator.layers
        self.model, self.cluster, self.train = evaluator.model, evaluator.cluster, evaluator.train
        self.kinds = len(self.model.blocks)
        self.num_units = self.kinds + 2
        self.alike = len(self.cluster.islands) == 1
        self.devices = tuple(self.layers.devices.values())
        self.names = [device.name for device in self.devices]
        self._glances: dict[tuple, np.ndarray] = {}
        self._nears: dict[tuple, int] = {}
        self._indices: dict[tuple, int] = {}
        self._distinct: list[dict[str, Group]] = []
        self._alones: dict[tuple, Alone] = {}

    def units(self, recompute: str) -> tuple[Unit, ...]:
        """The units in the order of the columns."""
        blocks = tuple(Unit(kind, recompute) for kind in range(self.kinds))
        return (*blocks, Unit("embedding", "none"), Unit("head", "none"))

    def groups_on(self, core: Core) -> np.ndarray:
        """Groups of tensor- and context-parallel ranks [D] that each kind of device could hold at most."""
        held = np.zeros(len(self.names))
        for island in self.cluster.islands:
            held[self.names.index(island.device.name)] += island.num_devices / (core.tp * core.cp)
        return held

    def ideal_seconds(self, core: Core, ways: Iterable[tuple[bool, str, str]]) -> float:
        """All kernels of the blocks, spread over the ranks with no bubble and nothing exchanged; `ways` are the
        (sp, algorithm, attention) that go with the core."""
        layers = np.array(self.model.layers_by_kind, float)
        count, groups = self.train.global_batch // core.mb, self.groups_on(core)
        each = (self._alone(core, way).kernels[:, :2, : self.kinds].sum(axis=1) for way in ways)
        return count * min(float(spread(one, layers, groups)) for one in each)

    def _alone(self, core: Core, way: tuple[bool, str, str]) -> Alone:
        same = (core.tp, core.cp, core.mb, core.ep, core.etp, way)
        found = self._alones.get(same)
        if found is None:
            plan = bare(core, *way)
            book = self.layers.book(plan, self.layers.mesh(plan))
            programs = [[book.entries(u, which) for u in self.units("none")] for which in PASSES]
            found = self._alones[same] = Alone(
                kernels=np.array(
                    [[[self._kernels(entries, d) for entries in row] for row in programs] for d in self.devices]
                ),
                waited=tuple(tuple(waited_for(entries, way[1]) for entries in programs[i]) for i in (0, 2)),
            )
        return found

    def _kernels(self, entries: list[Entry], device: Device) -> float:
        price = self.evaluator.costs.price
        return sum(price(e.work, device).seconds for e in entries if e.queue == "compute")

    def costs(self, core: Core, inners: Sequence[Inner]) -> Costs:
        """What layers cost at least: kernels, and the collectives they wait for on the groups that an order gives
        them. No layer is simulated and memory is left out; what is bounded with these needs no price of its own."""
        columns = []
        sizes = (core.tp, core.cp, core.mb, core.ep, core.etp)
        near = {order: self._near(core, order) for order in dict.fromkeys(i.order for i in inners)}
        known: dict[tuple, np.ndarray] = {}
        for inner in inners:
            again = inner.recompute == "full" and not inner.recompute_layers
            way = (inner.sp, inner.algorithm, inner.attention)
            brief = (near[inner.order], way, again, inner.dtype, "tp" in inner.overlap)
            found = known.get(brief)
            if found is None:
                same = (sizes, *brief)
                found = self._glances.get(same)
                if found is None:
                    found = self._glances[same] = self._glanced(core, inner, brief[0])
                known[brief] = found
            columns.append(found)
        nothing = np.zeros((len(inners), self.num_units))
        each = np.array(columns).transpose(1, 2, 0, 3)
        return Costs(
            each=each,
            slowest=each.max(axis=0),
            send=nothing[:, 0],
            saved=nothing,
            held=nothing,
            working=nothing,
        )

    def _glanced(self, core: Core, inner: Inner, near: int) -> np.ndarray:
        """Seconds [D, 4, U] of F, BW, B, W. A precision that is not the workload's makes kernels faster: then nothing
        is known without pricing."""
        if inner.dtype:
            return np.full((len(self.names), len(PASSES), self.num_units), 1e-30)
        alone = self._alone(core, (inner.sp, inner.algorithm, inner.attention))
        forward, whole, back, weight = alone.kernels.transpose(1, 0, 2)  # [D, U] each
        if "tp" not in inner.overlap and self.alike:
            groups, device = self._distinct[near], next(iter(self.layers.devices.values()))
            price = self.evaluator.costs.price
            forward, back = (
                kernels
                + [
                    sum(
                        n * price(Collective(op=op, num_bytes=size, group=groups[queue]), device).seconds
                        for queue, op, size, n in unit
                    )
                    for unit in waited
                ]
                for kernels, waited in zip((forward, back), alone.waited)
            )
        whole = np.maximum(whole, back)
        if inner.recompute == "full" and not inner.recompute_layers:
            again = forward * (np.arange(self.num_units) < self.kinds)
            back, whole = back + again, np.maximum(whole, back) + again
        return np.stack((forward, whole, back, weight), axis=1)

    def _near(self, core: Core, order: tuple[str, ...]) -> int:
        """Which groups layers communicate over, as an index into ``_distinct``: orders that agree share one."""
        layout = Layout(tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, order=order)
        # without experts, and on one island, a group is its size and how far apart its ranks are
        simple = core.ep == 1 and self.alike
        key = (
            (core.devices, core.tp, layout.stride("tp"), core.cp, layout.stride("cp"))
            if simple
            else (core._replace(mb=1), order)
        )
        found = self._nears.get(key)
        if found is None:
            mesh = self.layers.mesh(Plan(layout=layout, experts=Experts(ep=core.ep, etp=core.etp)))
            groups = {"tp": mesh.group("tp"), "cp": mesh.group("cp"), "ep": mesh.expert_group("ep")}
            index = self._indices.setdefault(tuple(groups.values()), len(self._distinct))
            if index == len(self._distinct):
                self._distinct.append(groups)
            found = self._nears[key] = index
        return found
