"""A core's region of the space as columns: what its inner, piped and state parts cost, ready to be broadcast.

Layers are priced once per context (:mod:`meshwright.search.layers`), schedules timed once per number of ranks,
microbatches and chunks, exchanges once per group; a region of a hundred thousand plans is then a few arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from meshwright import schedules
from meshwright.cost.roofline import contention
from meshwright.lower.partition import even
from meshwright.lower.place import Mesh
from meshwright.plan import Experts, Layout, Plan
from meshwright.plan.slices import kinds
from meshwright.search.clock import ScheduleClock
from meshwright.search.columns import CoreColumns, units_of
from meshwright.search.evaluate import Evaluator
from meshwright.search.exchanges import Exchanges
from meshwright.search.glance import PASSES, Glances
from meshwright.search.layers import Book
from meshwright.search.parts import Inners
from meshwright.search.paths import Paths, Rows, Work, paths
from meshwright.search.settle import concrete, dealt_by, shares_of
from meshwright.search.space import BALANCED, EVEN, PLAIN, WHOLE, Core, Inner, Piped, State, plan_of
from meshwright.simulate.schedule_times import takes_times

USUAL = Inner()


class Regions:
    """Columns of the regions of one question."""

    def __init__(self, evaluator: Evaluator, *, chain: bool = True):
        """`chain`: in all plans gradients go from stage to stage."""
        self.chain = chain
        self.evaluator, self.layers = evaluator, evaluator.layers
        self.model, self.cluster, self.train = evaluator.trained, evaluator.cluster, evaluator.train
        self.glances, self.exchanges = Glances(evaluator), Exchanges(evaluator)
        self.kinds, self.num_units = evaluator.kinds, evaluator.num_units
        self.contention = min(map(contention, evaluator.devices))
        self.host_s = evaluator.costs.framework.host_us_per_pass * 1e-6
        self._paths: dict[tuple, Paths] = {}
        self._rows: dict[tuple, Rows | Work] = {}
        self._clocks: dict[tuple, ScheduleClock] = {}
        self._counts: dict[tuple, np.ndarray] = {}
        self._prices: dict[tuple, float] = {}
        self._kinds: dict[tuple, tuple] = {}
        self._everywhere: dict[tuple, tuple] = {}
        #: The inner parts looked at last, and which of them have the same stages.
        self._grouped: tuple[Sequence[Inner], list[list[int]]] = ((), [])
        #: On one island ranks are alike; on several there are kinds of slices, on devices by their place in `names`.
        self.alike = evaluator.alike
        self.names = self.glances.names

    def placed(self, core: Core, inners: Inners, states: tuple[State, ...]) -> Inners:
        """The inner parts without those whose order puts every group where another order does: on one node, or where
        a group crosses the same levels either way, they are one plan written twice."""
        if not self.alike:
            return inners
        known: dict[tuple, int] = {}
        place = np.zeros(len(inners.orders), np.int64)
        for i in np.flatnonzero(np.bincount(inners.order)).tolist():
            place[i] = known.setdefault(self._groups(core._replace(mb=1), inners.orders[i], states), len(known))
        _, first = np.unique(place[inners.order] * len(inners.rests) + inners.rest, return_index=True)
        return inners.take(np.sort(first))

    def _groups(self, core: Core, order: tuple[str, ...], states: tuple[State, ...]) -> tuple:
        """Every group that a plan with this order communicates over."""
        key = (core, order, states)
        found = self._everywhere.get(key)
        if found is None:
            found = self._everywhere[key] = self._grouped_by(core, order, states)
        return found

    def _grouped_by(self, core: Core, order: tuple[str, ...], states: tuple[State, ...]) -> tuple:
        layout = Layout(tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, order=order)
        mesh = self.layers.mesh(Plan(layout=layout, experts=Experts(ep=core.ep, etp=core.etp)))
        starts = mesh.slices[0].starts
        scopes = dict.fromkeys(s.shard or core.dp * core.cp for s in states)
        return (
            *(mesh.group(axis) for axis in ("tp", "cp")),
            *(mesh.expert_group(axis) for axis in ("etp", "ep", "edp")),
            *(mesh.hybrid_groups(size, "cp", "dp") for size in scopes),
            *(mesh.hybrid_groups(size, "cp", "dp") for s in states if s.scopes != EVEN for size in s.scopes),
            *(mesh.hybrid_groups(s.hpz, "cp", "dp") for s in states if s.hpz),
            *(mesh.pair(a, b) for a, b in zip(starts, (*starts[1:], starts[0]))),
        )

    def kinds_of(self, core: Core, inner: Inner) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The kinds of slices of a layout: how many, and the device (its place in ``names``) of each pipeline rank."""
        key = (core.tp, core.cp, core.pp, core.dp, inner.order)
        found = self._kinds.get(key)
        if found is None:
            layout = Layout(tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, order=inner.order)
            found = self._kinds[key] = tuple(
                (len(k.members), tuple(self.names.index(d.name) for d in k.devices))
                for k in kinds(layout, self.cluster)
            )
        return found

    def costs(self, core: Core, inners: Inners) -> CoreColumns:
        """Return the costs of layers under each inner part, on every kind of device."""
        near = self.glances.near(core, inners.orders)
        code = near[inners.order] * len(inners.rests) + inners.rest  # those with the same groups share all but sends
        _, one, which = np.unique(code, return_index=True, return_inverse=True)
        columns = [self._inner(core, inners[i]) for i in one.tolist()]
        each = np.array([c[0] for c in columns])[which].transpose(1, 2, 0, 3)
        slowest, saved, held, working = (np.array([c[i] for c in columns])[which] for i in range(1, 5))
        return CoreColumns(
            each=each,
            slowest=each[0] if self.alike else slowest.transpose(1, 0, 2),
            send=self._sends(core, inners),
            saved=saved,
            held=held,
            working=working,
        )

    def _inner(self, core: Core, inner: Inner) -> tuple[np.ndarray, ...]:
        book, mesh = self._book(core, inner)
        # some of a chunk's layers may not recompute: such a mixture is no faster and no smaller than the better mode
        modes = {inner.recompute, "none"} if inner.recompute_layers else {inner.recompute}
        key = ("columns", *sorted(modes))
        found = book.columns.get(key)
        if found is None:
            found = book.columns[key] = self._columns(book, mesh, modes)
        return found

    def _book(self, core: Core, inner: Inner) -> tuple[Book, Mesh]:
        plan = plan_of(core, inner, PLAIN, WHOLE)
        mesh = self.layers.mesh(plan)
        return self.layers.book(plan, mesh), mesh

    def _sends(self, core: Core, inners: Inners) -> np.ndarray:
        """Seconds [A] of a message between neighbouring ranks of a pipeline."""
        out = np.zeros(len(inners))
        if core.pp == 1:
            return out
        known: dict[tuple, float] = {}
        for a, inner in enumerate(inners):
            same = inners.order[a], inner.sp, inner.dtype
            if same not in known:
                book, mesh = self._book(core, inner)
                key = (core, inner.order if not self.alike else mesh.layout.stride("pp"), inner.sp, inner.dtype)
                if key not in self._prices:
                    self._prices[key] = self._send(mesh, book)
                known[same] = self._prices[key]
            out[a] = known[same]
        return out

    def _columns(self, book: Book, mesh: Mesh, modes: set[str]) -> tuple[np.ndarray, ...]:
        """Return the layers' seconds, [D, 4, U] on each kind of device where it is fastest and [4, U] on the slowest
        rank, and their saved, held and workspace bytes, [U] each: over recompute `modes`, the least bytes and seconds,
        and the most seconds of the slowest rank."""
        where = {(d.name, 0 if self.alike else start) for s in mesh.slices for d, start in zip(s.devices, s.starts)}
        fastest, slowest, kept = [], [], []
        for mode in modes:
            units = units_of(self.kinds, mode)
            kept.append([[getattr(book.activations(u), f) for u in units] for f in ("saved", "held", "working")])
            each = np.full((len(self.names), len(PASSES), self.num_units), np.inf)
            most = np.zeros((len(PASSES), self.num_units))
            for device, start in where:
                seconds = np.array([[book.unit(u, which, device, start).seconds for u in units] for which in PASSES])
                index = self.names.index(device)
                each[index] = np.minimum(each[index], seconds)
                most = np.maximum(most, seconds)
            fastest.append(each)
            slowest.append(most)
        return np.min(fastest, axis=0), np.max(slowest, axis=0), *np.min(kept, axis=0)

    def _send(self, mesh: Mesh, book: Book) -> float:
        """Return the least seconds of a message between neighbouring ranks of a pipeline. The fastest two are not
        always those of a node: its devices may meet on a slower link than the network is."""
        slices = mesh.slices[:1] if self.alike else mesh.slices
        pairs = {mesh.pair(a, b) for s in slices for a, b in pairwise(s.starts)}
        binder = self.exchanges.binder(book.stages, mesh)
        return min(self.exchanges.price(binder.message(pair)) for pair in pairs)

    def alternatives(self, core: Core, inners: Sequence[Inner], piped: Piped) -> list[tuple[Piped, Inner, list[int]]]:
        """The inner parts in groups that have the same kinds of slices, shares and stages: these stages, one of the
        group, and which they are."""
        if self.alike and piped.stages != BALANCED:
            return [(piped, inners[0], list(range(len(inners))))]
        if self._grouped[0] is not inners:
            alike: dict[tuple, list[int]] = {}
            for a, i in enumerate(inners):
                alike.setdefault((dealt_by(i), i.shares), []).append(a)
            self._grouped = inners, list(alike.values())
        groups: dict[tuple, list[int]] = {}
        for chosen in self._grouped[1]:
            one = inners[chosen[0]]
            same = self.kinds_of(core, one), one.shares, concrete(core, one, piped, self.evaluator)
            groups.setdefault(same, []).extend(chosen)
        return [(settled, inners[chosen[0]], chosen) for (_, _, settled), chosen in groups.items()]

    def counts(self, num_stages: int, stages: str | tuple[int, ...]) -> np.ndarray:
        """Units of every virtual stage [S, U]."""
        key = (num_stages, stages)
        found = self._counts.get(key)
        if found is None:
            layers = stages if isinstance(stages, tuple) else even(self.model.num_layers, num_stages)
            found = np.zeros((num_stages, self.num_units))
            first = 0
            for s, n in enumerate(layers):
                for kind in self.model.pattern[first : first + n]:
                    found[s, kind] += 1
                first += n
            found[0, -2] += 1
            found[-1, -1] += 1
            self._counts[key] = found
        return found

    def paths(self, core: Core, piped: Piped, costs: CoreColumns, devices: tuple[int, ...] = ()) -> Paths:
        """Rows of a schedule, for ranks on these `devices` where that matters; the first context that asks says which
        times are typical."""
        count = self.train.global_batch // (core.dp * core.mb)
        # rows hold whatever the times; stages that are assigned are about as fast as each other, whatever they hold
        dealt = isinstance(piped.stages, tuple)
        key = (core.pp, count, piped.schedule, piped.vpp, () if dealt else devices, dealt)
        found = self._paths.get(key)
        if found is None:
            actions = schedules.build(piped.schedule, core.pp, count, piped.vpp)
            typical = int(np.argmin(costs.seconds[:2].sum(axis=(0, 2))))
            f, _, b, w = self.stage_seconds(core, piped, costs, [typical], devices, actions.stage_ranks).min(axis=0)[
                :, 0
            ]
            found = paths(actions, f, b, w, float(costs.send[typical]), chain=self.chain)
            if takes_times(plan_of(core, USUAL, piped, WHOLE)):
                found = found.of_any_order()
            self._paths[key] = found
        return found

    def work(self, core: Core, pipelines: tuple[Piped, ...]) -> Work | None:
        """Return the work of ranks under several schedules, None where devices are unlike or stages are balanced, so
        that it is not known without pricing."""
        if not self.alike or any(piped.stages == BALANCED for piped in pipelines):
            return None
        count = self.train.global_batch // (core.dp * core.mb)
        key = ("work", core.pp, count, pipelines)
        found = self._rows.get(key)
        if found is None:
            shapes = [
                (schedules.get(p.schedule), core.pp, p.vpp, self.counts(core.pp * p.vpp, p.stages)) for p in pipelines
            ]
            found = self._rows[key] = Work.of(shapes, count, chain=self.chain)
        return found

    def rows(self, core: Core, pipelines: tuple[Piped, ...], costs: CoreColumns) -> Rows | None:
        """The rows of several schedules at once, where ranks are alike and stages do not depend on the inner part."""
        if not self.alike or any(piped.stages == BALANCED for piped in pipelines):
            return None
        key = (core.pp, self.train.global_batch // (core.dp * core.mb), pipelines)
        found = self._rows.get(key)
        if found is None:
            each = [self.paths(core, piped, costs) for piped in pipelines]
            counts = [self.counts(core.pp * piped.vpp, piped.stages) for piped in pipelines]
            found = self._rows[key] = Rows.of(each, counts, self.kinds)
        return found

    def stage_seconds(
        self,
        core: Core,
        piped: Piped,
        costs: CoreColumns,
        chosen: list[int],
        devices: tuple[int, ...],
        stage_ranks: Sequence[tuple[int, ...]],
    ) -> np.ndarray:
        """Seconds of F, BW, B, W [turns, 4, chosen, S] of every stage under some inner parts, its ranks on `devices`;
        () where all are alike. Where stages are on two ranks, `turns` are both; else one."""
        held, turns = self.counts(core.pp * piped.vpp, piped.stages), max(map(len, stage_ranks))
        if not devices:
            return np.repeat((costs.seconds[:, chosen] @ held.T)[None], turns, axis=0)
        out = np.empty((turns, len(PASSES), len(chosen), len(held)))
        for turn in range(turns):
            owner = np.array([devices[ranks[turn % len(ranks)]] for ranks in stage_ranks])
            for device in set(owner.tolist()):
                there = np.flatnonzero(owner == device)
                out[turn][:, :, there] = costs.each[device][:, chosen] @ held[there].T
        return out

    def makespan(self, core: Core, inner: Inner, piped: Piped, costs: CoreColumns, a: int) -> float:
        """Seconds of the pipelines alone under one inner part's own times, -inf where stages or order are not known."""
        piped = concrete(core, inner, piped, self.evaluator)
        if takes_times(plan_of(core, USUAL, piped, WHOLE)) or not self.chain:
            return -np.inf
        if self.alike:
            return self._makespan(core, piped, costs, a, self.train.global_batch // (core.dp * core.mb), ())
        found = self.kinds_of(core, inner)
        even = self.train.global_batch // (core.dp * core.mb)
        counts = shares_of(core, inner, piped, self.evaluator) or (even,) * len(found)
        return max(self._makespan(core, piped, costs, a, n, row) for n, (_, row) in zip(counts, found))

    def _makespan(
        self, core: Core, piped: Piped, costs: CoreColumns, a: int, count: int, devices: tuple[int, ...]
    ) -> float:
        clock = self._clock(core.pp, count, piped)
        seconds = self.stage_seconds(core, piped, costs, [a], devices, clock.stage_ranks)[:, :, 0] + self.host_s
        return clock.makespan(seconds[:, [0, 2, 3, 1]], float(costs.send[a]))

    def _clock(self, pp: int, count: int, piped: Piped) -> ScheduleClock:
        key = (pp, count, piped.schedule, piped.vpp)
        found = self._clocks.get(key)
        if found is None:
            found = self._clocks[key] = ScheduleClock(schedules.build(piped.schedule, pp, count, piped.vpp))
        return found
