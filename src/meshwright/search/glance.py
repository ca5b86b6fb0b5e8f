"""Glances: the first lower bound of a region's layers, from the seconds of kernels and of exposed collectives.

No layer is simulated and no memory counted, so a region that this bound rules out is never priced in full.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.lower.entry import Entry
from meshwright.lower.units import Unit
from meshwright.plan import Experts, Layout, Plan
from meshwright.plan.facet import LAYER
from meshwright.plan.facets import fields
from meshwright.plan.facets.overlap import inside
from meshwright.search.columns import Alone, CoreColumns, spread, units_of, waited_for
from meshwright.search.evaluate import Evaluator
from meshwright.search.layers import Book, deciding_ends
from meshwright.search.parts import Inners
from meshwright.search.space import PLAIN, WHOLE, Core, Inner, plan_of
from meshwright.spec.ends import Contrastive
from meshwright.spec.hardware import Device
from meshwright.work import Collective, Group

PASSES = ("F", "BW", "B", "W")


class Glance(NamedTuple):
    """The first lower bound of all inner parts of a core.

    ``each`` [D, 4, G, U]: seconds at least, on D kinds of devices, of the passes F, BW, B, W over U units. Inner parts
    whose bound is the same share one of G rows: ``near[o] + brief[r]`` is the row of order o and rest r, where
    ``orders`` and ``rests`` are those of the core's inner parts (:class:`~meshwright.search.parts.Inners`).
    """

    orders: tuple[tuple[str, ...], ...]
    rests: tuple[Inner, ...]
    near: np.ndarray
    brief: np.ndarray
    each: np.ndarray


@lru_cache(maxsize=4096)
def _way(rest: Inner) -> Inner:
    """Return an inner part with the words that kernels depend on, and the defaults of the plainest plan otherwise."""
    sliced = tuple(name for name in rest.overlap if inside(name))
    usual = {name: fields()[name].usual for name in rest._fields if LAYER not in fields()[name].decides}
    return rest._replace(**usual | {"recompute": "none", "recompute_layers": 0, "overlap": sliced})


class Glances:
    """The first lower bounds of all regions of one question, computed once each."""

    def __init__(self, evaluator: Evaluator):
        self.evaluator, self.layers = evaluator, evaluator.layers
        self.model, self.cluster, self.train = evaluator.trained, evaluator.cluster, evaluator.train
        self.kinds, self.num_units = evaluator.kinds, evaluator.num_units
        self.alike, self.devices = evaluator.alike, evaluator.devices
        self.names = [device.name for device in self.devices]
        self._waits: dict[tuple, np.ndarray] = {}
        self._ends: dict[tuple, list[Entry]] = {}
        self._glances: dict[Core, Glance] = {}
        self._nears: dict[tuple, int] = {}
        self._indices: dict[tuple, int] = {}
        self._distinct: list[dict[str, tuple[int, Group]]] = []
        self._numbers: dict[Group, int] = {}
        self._alones: dict[tuple, Alone] = evaluator.kernels

    def groups_on(self, core: Core) -> np.ndarray:
        """Groups of tensor- and context-parallel ranks [D] that each kind of device could hold at most."""
        held = np.zeros(len(self.names))
        for island in self.cluster.islands:
            held[self.names.index(island.device.name)] += island.num_devices / (core.tp * core.cp)
        return held

    def ideal_seconds(self, core: Core, inners: Inners) -> float:
        """All kernels of the blocks, spread over the ranks with no bubble and nothing exchanged, under the inner part
        whose kernels are fastest."""
        layers = np.array(self.model.layers_by_kind, float)
        count, groups = self.train.global_batch // core.mb, self.groups_on(core)
        ways = dict.fromkeys(_way(rest) for rest in inners.rests)
        each = (self._alone(core, way).kernels[:, :2, : self.kinds].sum(axis=1) for way in ways)
        return count * min(float(spread(one, layers, groups)) for one in each)

    def _alone(self, core: Core, way: Inner) -> Alone:
        replicas = core.dp if isinstance(self.model.head, Contrastive) else 1  # whose vectors meet in its loss
        same = (core.tp, core.cp, core.mb, core.ep, core.etp, replicas, way)
        found = self._alones.get(same)
        if found is None:
            plan = plan_of(core, way, PLAIN, WHOLE)
            book = self.layers.book(plan, self.layers.mesh(plan))
            programs = [[self._entries(book, u, which) for u in units_of(self.kinds, "none")] for which in PASSES]
            again = [self._entries(book, u, "B") for u in units_of(self.kinds, "selective")]
            kernels = np.array(
                [[[self._kernels(entries, d) for entries in row] for row in (*programs, again)] for d in self.devices]
            )
            found = self._alones[same] = Alone(
                number=len(self._alones),
                kernels=kernels[:, :4],
                core=kernels[:, 4] - kernels[:, 2],
                waited=waited_for((programs[0], programs[2]), way.algorithm),
            )
        return found

    def _entries(self, book: Book, unit: Unit, which: str) -> list[Entry]:
        """Return the operators of a pass; those of embedding and head are the same for equal numbers of tokens."""
        if unit.is_block:
            return book.entries(unit, which)
        c = book.stages.context()
        key = (unit.kind, which, c.tokens, c.tp, c.sp, c.dp_group.size, *deciding_ends(c.plan))
        found = self._ends.get(key)
        if found is None:
            found = self._ends[key] = book.entries(unit, which)
        return found

    def _kernels(self, entries: list[Entry], device: Device) -> float:
        price = self.evaluator.costs.price
        return sum([price(e.work, device).seconds for e in entries if e.queue == "compute"])

    def costs(self, core: Core, inners: Inners) -> tuple[CoreColumns, np.ndarray, np.ndarray]:
        """Return the first lower bound of A inner parts: the costs of G rows, one of the inner parts of each row [G],
        and the row of every inner part [A].

        Inner parts with the same bound share a row. It counts kernels, and the collectives they wait for on the groups
        that the order of the axes gives them; no layer is simulated and memory is left out."""
        found = self._glances.get(core)
        if found is None or found.orders is not inners.orders or found.rests is not inners.rests:
            found = self._glances[core] = self._glance(core, inners)
        code, one, which = np.unique(
            found.brief[inners.rest] + found.near[inners.order], return_index=True, return_inverse=True
        )
        each = found.each[:, :, code]
        nothing = np.zeros((len(one), self.num_units))
        rough = CoreColumns(
            each=each, slowest=each.max(axis=0), send=nothing[:, 0], saved=nothing, held=nothing, working=nothing
        )
        return rough, one, which

    def near(self, core: Core, orders: tuple[tuple[str, ...], ...]) -> np.ndarray:
        """Return the number of the set of groups that layers communicate over under each of `orders`, [orders]; on
        islands that are not alike every order has its own."""
        if not self.alike:
            return np.arange(len(orders))
        return np.array([self._near(core, order) for order in orders])

    def _brief(self, rest: Inner) -> tuple:
        """Return all that the bound of an inner part depends on besides its order, as a key."""
        mode = "none" if rest.recompute_layers else rest.recompute
        waits = self.alike and not any(map(inside, rest.overlap))
        beside = waits and "ep" in rest.overlap
        return _way(rest), mode == "full", mode == "selective", waits, beside, None if self.alike else rest.shares

    def _glance(self, core: Core, inners: Inners) -> Glance:
        near, place = np.unique(self.near(core, inners.orders), return_inverse=True)
        briefs: dict[tuple, int] = {}
        brief = np.array([briefs.setdefault(self._brief(rest), len(briefs)) for rest in inners.rests])
        return Glance(inners.orders, inners.rests, place, brief * len(near), self._glanced(core, list(briefs), near))

    def _glanced(self, core: Core, briefs: list[tuple], near: np.ndarray) -> np.ndarray:
        """Return the least seconds [D, 4, G, U] of F, BW, B, W for each of `briefs` with each set of groups, `near`."""
        ways = list(dict.fromkeys(way for way, *_ in briefs))
        alone = [self._alone(core, way) for way in ways]
        which = np.array([ways.index(way) for way, *_ in briefs])
        full, repeats, waits, beside = np.array([brief[1:5] for brief in briefs], bool).T[:, :, None, None, None]
        each = np.repeat(np.array([a.kernels for a in alone])[which][:, None], len(near), axis=1)  # [B, N, D, 4, U]
        forward, whole, back = each[:, :, :, 0], each[:, :, :, 1], each[:, :, :, 2]
        if waits.any():
            waited = np.array([[self._waited(a, n) for n in near.tolist()] for a in alone])[which] * waits[..., None]
            waited = waited[:, :, 0] + waited[:, :, 1] * (1 - beside)  # what is overlapped slows kernels, by little
            forward += waited[:, :, None, 0]
            back += waited[:, :, None, 1]
        np.maximum(whole, back, out=whole)
        repeated = forward * full + np.array([a.core for a in alone])[which][:, None] * repeats
        repeated[..., self.kinds :] = 0.0
        whole += repeated
        back += repeated
        return each.reshape(-1, *each.shape[2:]).transpose(1, 2, 0, 3)

    def _waited(self, alone: Alone, near: int) -> np.ndarray:
        """Return the seconds [2, 2, U] of the exposed collectives of F and B on one set of groups: first those on other
        queues than the experts', then the experts'."""
        found = self._waits.get((alone.number, near))
        if found is None:
            found = np.zeros((2, 2, self.num_units))
            for queue, passes in alone.waited.items():
                number, group = self._distinct[near][queue]
                known = self._waits.get((alone.number, queue, number))
                if known is None:
                    known = self._waits[alone.number, queue, number] = np.array(
                        [[self._exchanged(unit, group) for unit in units] for units in passes]
                    )
                found[int(queue == "ep")] += known
            self._waits[alone.number, near] = found
        return found

    def _exchanged(self, collectives: list[tuple[str, float, int]], group: Group) -> float:
        price, device = self.evaluator.costs.price, self.devices[0]
        return sum(
            n * price(Collective(op=op, num_bytes=size, group=group), device).seconds for op, size, n in collectives
        )

    def _near(self, core: Core, order: tuple[str, ...]) -> int:
        """Return the set of groups that layers communicate over, as an index into ``_distinct``: orders with the same
        groups share one."""
        key = (core._replace(mb=1), order)
        found = self._nears.get(key)
        if found is None:
            layout = Layout(tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, order=order)
            mesh = self.layers.mesh(Plan(layout=layout, experts=Experts(ep=core.ep, etp=core.etp)))
            groups = {"tp": mesh.group("tp"), "cp": mesh.group("cp"), "ep": mesh.expert_group("ep")}
            groups["etp"] = mesh.expert_group("etp")
            if isinstance(self.model.head, Contrastive):  # whose loss is over the batches of all replicas
                groups["dp"] = mesh.group("dp")
            numbered = {queue: (self._numbers.setdefault(g, len(self._numbers)), g) for queue, g in groups.items()}
            index = self._indices.setdefault(tuple(n for n, _ in numbered.values()), len(self._distinct))
            if index == len(self._distinct):
                self._distinct.append(numbered)
            found = self._nears[key] = index
        return found
