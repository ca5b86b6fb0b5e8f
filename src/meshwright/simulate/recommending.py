"""The step of a recommendation model on the virtual clock, and the walk that finds a way for each of its tables."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from meshwright.assign.tables import COLUMNS, REPLICATED, ROWS, WHOLE, TablePlacement, place_tables
from meshwright.causes import CAUSE, PRICED
from meshwright.cost import Costs
from meshwright.graph import QUEUE
from meshwright.lower.place import Mesh
from meshwright.lower.recommending import (
    GRADIENT,
    LOOKUP,
    NUMBER,
    ROW_UPDATE,
    RankTables,
    RecommendingStep,
    items_of,
    recommending_step,
)
from meshwright.plan.facets.embeddings import AUTO, NODE
from meshwright.plan.record import Plan
from meshwright.simulate.engine import times
from meshwright.simulate.price import Priced, Pricer
from meshwright.spec.cluster import Cluster
from meshwright.spec.recommender import Recommender
from meshwright.spec.samples import SampleBatch
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.timeline import Timeline, from_times
from meshwright.work import Elementwise

#: The way of each table, with its slices by columns.
Ways = tuple[tuple[str, int], ...]
#: Bounds of replicated tables' rows that a walk begins with, and the changes it makes at most.
SMALL_ROWS = (0, 1_000, 10_000, 100_000)
MOST_CHANGES = 24
#: Where the time of a step goes, in the order it is shown; sums to it (mean over ranks).
PLACES: dict[str, str] = {
    "lookup": "lookups in embedding tables",
    "gemm": "matrix multiplications",
    "elementwise": "activations, pairs and other memory-bound kernels",
    "host": "launch overhead that kernels do not hide",
    "update": "updates of rows that were looked up",
    "optimizer": "update of dense layers and replicated tables",
    "all_to_all": "exposed exchange of pooled embeddings and their gradients",
    "all_reduce": "exposed sums of gradients over replicas",
    "unequal": "waiting for ranks whose tables take longer",
}


class PlacedTables(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose tables are placed in these ``ways``: its seconds, and bytes of memory by kind of every rank."""

    ways: Ways
    step: RecommendingStep
    priced: Priced
    start_s: np.ndarray
    end_s: np.ndarray
    held: tuple[dict[str, float], ...]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return float(self.end_s.max())

    @property
    def fullest(self) -> float:
        """Bytes of the fullest rank."""
        return max(sum(one.values()) for one in self.held)


class RecommendingTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A timed step: how its tables are ``placed``, its ``timeline``, its seconds by :data:`PLACES` and the relative
    error ``sigma`` of its prices; ``tried`` steps were timed to find the ways of its tables."""

    placed: PlacedTables
    timeline: Timeline
    places: dict[str, float]
    sigma: float
    tried: int


class TableWalk:
    """Steps of one question whose tables are placed in different ways, each timed once."""

    def __init__(self, model: Recommender, plan: Plan, cluster: Cluster, work: SampleBatch, costs: Costs):
        self.model, self.plan, self.cluster, self.work, self.costs = model, plan, cluster, work, costs
        self.pricer = Pricer(costs)
        device = cluster.islands[0].device
        self.capacity = float(device.memory_bytes)
        sample = 1e9  # long enough that starts of kernels do not count
        self.byte_s = costs.price(Elementwise(num_bytes=sample, fused=True), device).seconds / sample
        hops = Mesh(plan, cluster).group("dp").hops
        gb_s = min((hop.gb_s / hop.below for hop in hops), default=0.0)
        share = DTYPE_BYTES[plan.embeddings.pooled] / NUMBER
        self.sent_s = share / (gb_s * 1e9) if gb_s else 0.0
        self.known: dict[Ways, PlacedTables] = {}

    def asked(self) -> RecommendingTimes:
        """The step with the ways that the plan says."""
        said = self.plan.embeddings
        if said.way == AUTO:
            return self.told(self.found())
        way = {"table": (WHOLE, 1), "row": (ROWS, 1), "column": (COLUMNS, said.columns)}[said.way]
        return self.told(self.timed(self.ways(way, said.small)))

    def told(self, one: PlacedTables) -> RecommendingTimes:
        """A step with all that is said of it."""
        step, priced = one.step, one.priced
        timeline = from_times(step.graph, one.start_s, one.end_s, parts=_parts(priced))
        count = np.bincount(step.graph.cost_key, minlength=len(step.programs))
        known = float((count @ priced.parts).sum())
        spread = float(np.sqrt(((count @ priced.spread) ** 2).sum()))
        return RecommendingTimes(
            placed=one,
            timeline=timeline,
            places=_places(step, priced, timeline),
            sigma=spread / known if known else 0.0,
            tried=len(self.known),
        )

    def ways(self, way: tuple[str, int], small: int) -> Ways:
        """One way for all tables but the small ones, which are replicated, and those of fewer rows than there are
        ranks, which no row of some rank would have: whole."""
        fewest = self.plan.layout.num_ranks
        out = []
        for table in self.model.tables:
            short = way[0] == ROWS and table.rows < fewest
            out.append((REPLICATED, 1) if table.rows <= small else (WHOLE, 1) if short else way)
        return tuple(out)

    def found(self) -> PlacedTables:
        """Walk from the best way that all tables may have, with small ones replicated as is best, by changes of one
        table of the busiest rank at a time, while the step gets shorter; what does not fit is longer than all that
        does."""
        said = self.plan.embeddings
        first = [said.small] if said.small else SMALL_ROWS
        begins = [self.ways(way, small) for way in self._alike() for small in first]
        best = min(map(self.timed, begins), key=self._rank)
        for _ in range(MOST_CHANGES):
            ways = list(self._changed(best))
            other = min(map(self.timed, ways), key=self._rank, default=best)
            if self._rank(other) >= self._rank(best):
                break
            best = other
        return best

    def _alike(self) -> list[tuple[str, int]]:
        """Ways that all tables may have: whole, by rows, or in two slices and twice as many while they divide."""
        slices, most, dim = [], min(self.plan.layout.num_ranks, self.cluster.islands[0].node.devices), self.model.dim
        while (parts := 2 * slices[-1] if slices else 2) <= most and dim % parts == 0:
            slices.append(parts)
        return [(WHOLE, 1), (ROWS, 1), *((COLUMNS, parts) for parts in slices)]

    def _rank(self, one: PlacedTables) -> tuple[float, float]:
        over = max(0.0, one.fullest - self.capacity)
        return over, one.seconds

    def _changed(self, one: PlacedTables) -> Iterator[Ways]:
        """Ways in which one table of the busiest rank, or of the fullest one, is placed otherwise: the three costliest
        of each."""
        placement, ranks = one.step.placement, one.step.ranks
        busiest = max(range(len(ranks)), key=lambda r: ranks[r].lookup + ranks[r].update)
        fullest = max(range(len(ranks)), key=lambda r: ranks[r].tables)
        tables = []
        for rank, what in ((busiest, "cost"), (fullest, "num_bytes")):
            mine = [t for t in range(len(self.model.tables)) if rank in placement.ranks(t)]
            mine.sort(key=lambda t: -getattr(placement.items[t], what) / len(placement.ranks(t)))
            tables += mine[:3]
        dim, most = self.model.dim, placement.tower
        for table in dict.fromkeys(tables):
            way, parts = one.ways[table]
            others = [(WHOLE, 1), (ROWS, 1)] if self.model.tables[table].rows >= len(ranks) else [(WHOLE, 1)]
            others += [(COLUMNS, n) for n in (parts * 2, 2) if n <= most and dim % n == 0]
            for other in dict.fromkeys(others):
                if other != (way, parts):
                    yield (*one.ways[:table], other, *one.ways[table + 1 :])

    def timed(self, ways: Ways) -> PlacedTables:
        """The step with these ways of tables."""
        if ways not in self.known:
            self.known[ways] = self._timed(ways)
        return self.known[ways]

    def placed(self, ways: Ways) -> TablePlacement:
        """The tables in these ways, on ranks with room for them beside all else."""
        plan, ranks = self.plan, self.plan.layout.num_ranks
        tower = min(ranks, self.cluster.islands[0].node.devices) if plan.embeddings.towers == NODE else ranks
        items = items_of(self.model, self.work, ways, self.byte_s, self.sent_s)
        rest = sum(self._beside(RankTables(), self.model.dense_params(), len(self.model.tables)).values())
        room = self.capacity - rest
        return place_tables(items, ranks=ranks, tower=tower, capacity=max(0.0, room), method=plan.embeddings.spread)

    def _timed(self, ways: Ways) -> PlacedTables:
        step = recommending_step(self.model, self.plan, self.cluster, self.work, self.placed(ways))
        priced = self.pricer.all(step.programs)
        start, end = times(step.graph, priced.durations)
        held = {r: self._beside(r, step.dense_params, step.features - 1) for r in dict.fromkeys(step.ranks)}
        held_by = tuple(held[r] for r in step.ranks)
        return PlacedTables(ways=ways, step=step, priced=priced, start_s=start, end_s=end, held=held_by)

    def _beside(self, tables: RankTables, dense: int, features: int) -> dict[str, float]:
        """Bytes that a rank holds: its tables with optimizer state, dense layers in fp32 with gradients and state, the
        vectors that it looked up and received with their gradients, saved activations, indices of two steps."""
        work, model, framework = self.work, self.model, self.costs.framework
        own, element = work.batch / self.plan.layout.num_ranks, DTYPE_BYTES[work.dtype]
        count = features + 1
        wide = sum(model.bottom_mlp) + sum(model.top_mlp) + model.met_width(count) + model.dense_features
        wide += model.cross_layers * (count * model.dim + model.cross_rank)
        groups = 2 + (2 if self.plan.embeddings.towers == NODE else 0)
        held = {
            "tables": tables.tables,
            "dense layers": dense * (2 * NUMBER + NUMBER * work.dense_state + (element if element < NUMBER else 0.0)),
            "pooled embeddings": 2 * NUMBER * (work.batch * tables.width + own * features * model.dim),
            "activations": own * wide * element,
            "indices": 2 * tables.indices,
        }
        held["allocator slack"] = framework.allocator_slack * sum(held.values())
        held["communicators"] = groups * framework.communicator_bytes
        return held | {"context": framework.context_bytes}


def _parts(priced: Priced) -> dict[str, np.ndarray]:
    return {cause: priced.parts[:, i] for i, cause in enumerate(PRICED) if priced.parts[:, i].any()}


def _places(step: RecommendingStep, priced: Priced, timeline: Timeline) -> dict[str, float]:
    """Seconds of the step by :data:`PLACES`, mean over ranks. While a rank waits for a collective, the time in which
    that ran is exposed, and the time before it began is waited for other ranks."""
    total = dict.fromkeys(PLACES, 0.0)
    weight = np.array(timeline.multiplicity, float)
    weight /= weight.sum()
    exchange = {QUEUE["ep"]: "all_to_all", QUEUE["dp"]: "all_reduce"}
    for rank, share in enumerate(weight):
        mine = np.flatnonzero((timeline.rank == rank) & (timeline.queue == QUEUE["compute"]))
        mine = mine[np.argsort(timeline.start_s[mine], kind="stable")]
        others = np.flatnonzero((timeline.rank == rank) & (timeline.queue != QUEUE["compute"]))
        clock = 0.0
        for span in (*mine.tolist(), -1):
            begins = float(timeline.start_s[span]) if span >= 0 else timeline.makespan_s
            left = begins - clock
            if left > 0:
                for queue, place in exchange.items():
                    some = others[timeline.queue[others] == queue]
                    ran = np.minimum(timeline.end_s[some], begins) - np.maximum(timeline.start_s[some], clock)
                    seconds = min(left, float(np.maximum(ran, 0.0).sum()))
                    total[place] += share * seconds
                    left -= seconds
                total["unequal"] += share * left
            if span < 0:
                break
            key = int(timeline.cost_key[span])
            name = step.programs[key].name
            for cause, place in CAUSE.items():
                own = (
                    {LOOKUP: "lookup", ROW_UPDATE: "update", GRADIENT: "update"}.get(name) if cause != "host" else None
                )
                where = own or (cause if cause in PLACES else "elementwise")
                total[where] += share * float(priced.parts[key, place])
            clock = float(timeline.end_s[span])
    return {place: float(seconds) for place, seconds in total.items()}
