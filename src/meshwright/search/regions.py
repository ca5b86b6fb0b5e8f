"""A core's region of the space as columns: what its inner, piped and state parts cost, ready to be broadcast.

Layers are priced once per context (:mod:`meshwright.search.layers`), schedules timed once per number of ranks,
microbatches and chunks, exchanges once per group; a region of a hundred thousand plans is then a few arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from meshwright import schedules
from meshwright.cost.roofline import contention
from meshwright.lower.exchange import Exchanger, exchange_of
from meshwright.lower.layer import Entry
from meshwright.lower.partition import even
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages, Unit
from meshwright.lower.state import STORED_BYTES, gathered_bytes, static_bytes
from meshwright.lower.step import Exchange, Key, Send, Update
from meshwright.plan import Experts, Layout, Plan
from meshwright.plan.facets import DEFAULT_ORDER
from meshwright.schedules.actions import BW, W
from meshwright.schedules.timing import in_order_times
from meshwright.search.columns import Alone, Costs, Exchanged, waited_for
from meshwright.search.evaluate import Evaluator
from meshwright.search.layers import Book, SharedPricer
from meshwright.search.paths import Paths, paths
from meshwright.search.space import BALANCED, Core, Inner, Piped, State, bare, plan_of
from meshwright.simulate.schedule_times import takes_times
from meshwright.work import Collective, Group

PLAIN = Piped("1f1b", 1, "even")
USUAL = Inner(DEFAULT_ORDER, True, "ring", "none", 0, "flash", "", "fp32", "fp32", "fp32", ("dp", "pp"), 1.0, "eager")
WHOLE = State(0, 0)
PASSES = ("F", "BW", "B", "W")


class Regions:
    """Columns of the regions of one question."""

    def __init__(self, evaluator: Evaluator):
        self.evaluator, self.layers = evaluator, evaluator.layers
        self.model, self.cluster, self.train = evaluator.model, evaluator.cluster, evaluator.train
        self.kinds = len(self.model.blocks)
        self.num_units = self.kinds + 2
        self.contention = min(contention(d) for d in self.layers.devices.values())
        self.host_s = evaluator.costs.framework.host_us_per_pass * 1e-6
        self._paths: dict[tuple, Paths] = {}
        self._counts: dict[tuple, np.ndarray] = {}
        self._prices: dict[tuple, float] = {}
        self._glances: dict[tuple, np.ndarray] = {}
        self._nears: dict[tuple, int] = {}
        self._indices: dict[tuple, int] = {}
        self._distinct: list[dict[str, Group]] = []
        self._alones: dict[tuple, Alone] = {}
        #: On one island ranks are alike; on several only what no rank can beat is taken.
        self.alike = len(self.cluster.islands) == 1

    def units(self, recompute: str) -> tuple[Unit, ...]:
        """The units in the order of the columns."""
        blocks = tuple(Unit(kind, recompute) for kind in range(self.kinds))
        return (*blocks, Unit("embedding", "none"), Unit("head", "none"))

    def placed(self, core: Core, inners: Sequence[Inner], states: Sequence[State]) -> list[Inner]:
        """The inner parts without those whose order puts every group where another order does: on one node, or where
        a group crosses the same levels either way, they are one plan written twice."""
        groups = {order: self._groups(core, order, states) for order in dict.fromkeys(i.order for i in inners)}
        seen: set[tuple] = set()
        out = []
        for inner in inners:
            key = (groups[inner.order], inner._replace(order=()))
            if key not in seen:
                seen.add(key)
                out.append(inner)
        return out

    def _groups(self, core: Core, order: tuple[str, ...], states: Sequence[State]) -> tuple:
        """Every group that a plan with this order communicates over."""
        layout = Layout(tp=core.tp, cp=core.cp, pp=core.pp, dp=core.dp, order=order)
        if not self.alike:
            return order
        mesh = self.layers.mesh(Plan(layout=layout, experts=Experts(ep=core.ep, etp=core.etp)))
        starts = mesh.slices[0].starts
        scopes = dict.fromkeys(s.shard or core.dp * core.cp for s in states)
        return (
            *(mesh.group(axis) for axis in ("tp", "cp")),
            *(mesh.expert_group(axis) for axis in ("etp", "ep", "edp")),
            *(mesh.hybrid_groups(size, "cp", "dp") for size in scopes),
            *(mesh.pair(a, b) for a, b in zip(starts, (*starts[1:], starts[0]))),
        )

    def costs(self, core: Core, inners: Sequence[Inner]) -> Costs:
        """What layers cost under each inner part; on unequal islands on the fastest of them."""
        columns = [self._inner(core, inner) for inner in inners]
        return Costs(
            seconds=np.array([c[0] for c in columns]).transpose(1, 0, 2),
            send=np.array([c[1] for c in columns]),
            saved=np.array([c[2] for c in columns]),
            held=np.array([c[3] for c in columns]),
            working=np.array([c[4] for c in columns]),
        )

    def _inner(self, core: Core, inner: Inner) -> tuple:
        plan = plan_of(core, inner, PLAIN, WHOLE)
        mesh = self.layers.mesh(plan)
        book = self.layers.book(plan, mesh)
        # some of a chunk's layers may not recompute: such a mixture is no faster and no smaller than the better mode
        modes = {inner.recompute, "none"} if inner.recompute_layers else {inner.recompute}
        key = ("columns", *sorted(modes))
        found = book.rows.get(key)
        if found is None:
            seconds, kept = [], []
            for mode in modes:
                units = self.units(mode)
                seconds.append([[self._fastest(book, mesh, u, which) for u in units] for which in PASSES])
                kept.append([[getattr(book.activations(u), f) for u in units] for f in ("saved", "held", "working")])
            found = book.rows[key] = (np.min(seconds, axis=0), *np.min(kept, axis=0))
        send = 0.0
        if core.pp > 1 and self.alike:
            stride = plan.layout.stride("pp")
            key = ("send", book, stride, core.devices)
            send = self._prices.get(key)
            if send is None:
                send = self._prices[key] = self._send(mesh, book, stride)
        return found[0], send, *found[1:]

    def _fastest(self, book: Book, mesh: Mesh, unit: Unit, which: str) -> float:
        """A pass over a unit where it is fastest: on any rank of any slice."""
        where = {(d.name, 0 if self.alike else start) for s in mesh.slices for d, start in zip(s.devices, s.starts)}
        return min(book.unit(unit, which, device, start).seconds for device, start in where)

    def _send(self, mesh, book: Book, stride: int) -> float:
        """A message between the first two ranks of a pipeline: no pair of neighbours is closer."""
        return self._price(book.stages, Send(mesh.pair(0, stride)), mesh)

    def _price(self, stages: Stages, key: Key, mesh: Mesh | None = None) -> float:
        priced = SharedPricer(stages, mesh or stages.mesh, self.evaluator.costs, None, (key,)).all()
        return float(priced.durations[0])

    def ideal_seconds(self, core: Core, ways: Iterable[tuple[bool, str, str]]) -> float:
        """All kernels of the blocks, spread over the ranks with no bubble and nothing exchanged; `ways` are the
        (sp, algorithm, attention) that go with the core."""
        layers = np.array(self.model.layers_by_kind, float)
        least = min(float((self._alone(core, way).kernels[:2, : self.kinds] @ layers).sum()) for way in ways)
        return self.train.global_batch // (core.dp * core.mb) * least / core.pp

    def _alone(self, core: Core, way: tuple[bool, str, str]) -> Alone:
        same = (core.tp, core.cp, core.mb, core.ep, core.etp, way)
        found = self._alones.get(same)
        if found is None:
            plan = bare(core, *way)
            book = self.layers.book(plan, self.layers.mesh(plan))
            programs = [[book.entries(u, which) for u in self.units("none")] for which in PASSES]
            found = self._alones[same] = Alone(
                kernels=np.array([[self._kernels(entries) for entries in row] for row in programs]),
                waited=tuple(tuple(waited_for(entries, way[1]) for entries in programs[i]) for i in (0, 2)),
            )
        return found

    def _kernels(self, entries: list[Entry]) -> float:
        works = [e.work for e in entries if e.queue == "compute"]
        price = self.evaluator.costs.price
        return min(sum(price(work, d).seconds for work in works) for d in self.layers.devices.values())

    def glance(self, core: Core, inners: Sequence[Inner]) -> Costs:
        """What layers cost at least: kernels, and the collectives they wait for on the groups that an order gives
        them. No layer is simulated and memory is left out; what is bounded with these needs no price of its own."""
        columns = []
        sizes = (core.tp, core.cp, core.mb, core.ep, core.etp)
        near = {order: self._near(core, order) for order in dict.fromkeys(i.order for i in inners)}
        known: dict[tuple, np.ndarray] = {}
        for inner in inners:
            again = inner.recompute == "full" and not inner.recompute_layers
            way = (inner.sp, inner.algorithm, inner.attention)
            waits = "tp" not in inner.overlap and "ep" not in inner.overlap
            brief = (near[inner.order], way, again, inner.dtype, waits, inner.loss)
            found = known.get(brief)
            if found is None:
                same = (sizes, *brief)
                found = self._glances.get(same)
                if found is None:
                    found = self._glances[same] = self._glanced(core, inner, brief[0])
                known[brief] = found
            columns.append(found)
        nothing = np.zeros((len(inners), self.num_units))
        return Costs(
            seconds=np.array(columns).transpose(1, 0, 2),
            send=nothing[:, 0],
            saved=nothing,
            held=nothing,
            working=nothing,
        )

    def _glanced(self, core: Core, inner: Inner, near: int) -> np.ndarray:
        """Seconds [4, U] of F, BW, B, W. A precision that is not the workload's and a fused loss make kernels faster:
        then nothing is known without pricing."""
        if inner.dtype or inner.loss != USUAL.loss:
            return np.zeros((len(PASSES), self.num_units))
        alone = self._alone(core, (inner.sp, inner.algorithm, inner.attention))
        forward, whole, back, weight = alone.kernels
        if "tp" not in inner.overlap and "ep" not in inner.overlap and self.alike:
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
            again = np.append(forward[: self.kinds], [0.0, 0.0])
            back, whole = back + again, np.maximum(whole, back) + again
        return np.stack((forward, whole, back, weight))

    def paired(self, core: Core, inners: Sequence[Inner], piped: Piped, blocks: int) -> np.ndarray:
        """Seconds [A] in which two ranks that hold copies of a stage add up its gradients, which they do in the open:
        as many exchanges as a rank holds stages, of `blocks` blocks each, between neighbours at best."""
        if schedules.get(piped.schedule).placement != "bidirectional" or not self.alike:
            return np.zeros(len(inners))
        known: dict[tuple, float] = {}
        for inner in inners:
            same = (inner.order, inner.grads, inner.dtype)
            if same not in known:
                plan = plan_of(core, inner, PLAIN, WHOLE)
                mesh = self.layers.mesh(plan)
                stages = self.layers.stages(plan, mesh)
                params = (stages.params(u) for u in self.units("none")[: self.kinds])
                least = min(p.trained_dense + p.trained_expert for p in params)
                work = Collective(
                    op="all_reduce",
                    num_bytes=blocks * least * STORED_BYTES[inner.grads],
                    group=mesh.pair(0, plan.layout.stride("pp")),
                )
                device = next(iter(self.layers.devices.values()))
                known[same] = 2 * piped.vpp * self.evaluator.costs.price(work, device).seconds
        return np.array([known[i.order, i.grads, i.dtype] for i in inners])

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

    def crowded(self, core: Core, states: Sequence[State], inner: Inner) -> bool:
        """The blocks' constant state alone, spread evenly over the ranks, is more than a device holds."""
        room = max(d.memory_bytes for d in self.layers.devices.values())
        return self.least_state_bytes(core, states, inner) / core.pp > room

    def least_state_bytes(self, core: Core, states: Sequence[State], inner: Inner) -> float:
        """Constant bytes of all blocks over one pipeline, under the state part that needs least."""
        layers = np.array(self.model.layers_by_kind, float)
        return min(float(self.state_bytes(core, inner, s)[: self.kinds] @ layers) for s in states)

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

    def paths(self, core: Core, piped: Piped, costs: Costs) -> Paths:
        """Rows of a schedule; the first context that asks says which times are typical."""
        count = self.train.global_batch // (core.dp * core.mb)
        key = (core.pp, count, piped)
        found = self._paths.get(key)
        if found is None:
            actions = schedules.build(piped.schedule, core.pp, count, piped.vpp)
            held = self.counts(core.pp * piped.vpp, piped.stages)
            typical = int(np.argmin(costs.seconds[:2].sum(axis=(0, 2))))
            f, _, b, w = (held @ costs.seconds[i, typical] for i in range(4))
            found = paths(actions, f, b, w, float(costs.send[typical]))
            if takes_times(plan_of(core, USUAL, piped, WHOLE)):
                found = found.of_any_order()
            self._paths[key] = found
        return found

    def makespan(self, core: Core, piped: Piped, costs: Costs, a: int) -> float:
        """Seconds of the pipeline alone under one inner part's own times, -inf where stages or order are not known."""
        if piped.stages == BALANCED or takes_times(plan_of(core, USUAL, piped, WHOLE)):
            return -np.inf
        count = self.train.global_batch // (core.dp * core.mb)
        actions = schedules.build(piped.schedule, core.pp, count, piped.vpp)
        held = self.counts(core.pp * piped.vpp, piped.stages)
        f, whole, b, w = (held @ costs.seconds[i, a] + self.host_s for i in range(4))
        if np.any(actions.kind == W):
            # a full backward counts as B and W, and may be faster than both: no W is longer than what it saves
            b = np.minimum(b, whole)
            w = np.minimum(w, whole - b) if np.any(actions.kind == BW) else w
        else:
            b, w = whole, 0.0
        return float(in_order_times(actions, f, b, w, float(costs.send[a]))[1].max())

    def exchanged(self, core: Core, inners: Sequence[Inner], states: Sequence[State]) -> Exchanged:
        """What data parallelism exchanges, for every inner part and state part."""
        shape = (len(inners), len(states), self.kinds)
        gather, reduce = np.zeros(shape), np.zeros(shape)
        first, last = np.zeros(shape[:2]), np.zeros(shape[:2])
        known: dict[tuple, tuple] = {}
        for a, inner in enumerate(inners):
            for c, state in enumerate(states):
                same = (inner.order, inner.grads, inner.master, inner.moments, inner.dtype, state)
                if same not in known:
                    known[same] = self._exchange(core, inner, state)
                gather[a, c], reduce[a, c], first[a, c], last[a, c] = known[same]
        return Exchanged(gather=gather, reduce=reduce, first=first, last=last)

    def _exchange(self, core: Core, inner: Inner, state: State) -> tuple:
        plan = plan_of(core, inner, PLAIN, state)
        mesh = self.layers.mesh(plan)
        stages = self.layers.stages(plan, mesh)
        units = self.units("none")

        def seconds(what: str, *chosen: Unit) -> float:
            if core.dp * core.cp == 1 or not self.alike or (what == "gather" and not state.zero):
                return 0.0
            return self._price(stages, exchange_of(stages, mesh, chosen, what))

        blocks = units[: self.kinds]
        first = min(seconds("gather", units[-2], b) for b in blocks)
        norm = self._price(stages, Exchange((("all_reduce", 4.0, mesh.group("tp", "cp", "dp", "pp")),)))
        trained = sum(n * self._updated(stages, u) for u, n in zip(blocks, self.model.layers_by_kind))
        devices = {d.name for s in mesh.slices for d in s.devices}
        update = min(self._price(stages, Update(trained / core.pp, d)) for d in devices)
        return (
            [seconds("gather", b) for b in blocks],
            [seconds("reduce", b) for b in blocks],
            first,
            norm + update,
        )

    def _updated(self, stages, unit: Unit) -> float:
        return _Updates(None, None, None, stages, stages.mesh).parameters((unit,))

    def state_bytes(self, core: Core, inner: Inner, state: State) -> np.ndarray:
        """Constant bytes of each unit [U] on a rank that holds it; a tied head as where it shares the embedding's
        table, which some schedules place beside it."""
        plan = plan_of(core, inner, PLAIN, state)
        stages = self.layers.stages(plan, self.layers.mesh(plan))
        alone = plan_of(core._replace(pp=1), inner, PLAIN, state)
        beside = self.layers.stages(alone, self.layers.mesh(alone))
        out = np.zeros(self.num_units)
        for i, unit in enumerate(self.units("none")):
            params = (beside if unit.kind == "head" else stages).params(unit)
            out[i] = sum(static_bytes(plan, self.train, params).values())
            if core.pp > 1:
                out[i] += gathered_bytes(plan, params, self.train)
        return out


class _Updates(Exchanger):
    """Asked only for what an optimizer step touches."""

    def parameters(self, units: tuple[Unit, ...]) -> float:
        return self._updated(units)
