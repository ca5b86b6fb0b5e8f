"""Bounds: what no plan of a region can beat, in time and in memory, for all its plans at once.

Time. A path through a schedule is a linear function of its stages' times (:mod:`meshwright.search.paths`), so the
bounds of all inner parts under all schedules of a core are one matrix product. Around the path come what data
parallelism cannot hide: the gather before the first forward, the reductions that the last backward releases (they
share one queue, so they end no earlier than their sum after the first is released), the gradient norm and the
optimizer; kernels beside an exchange are slowed as the simulator slows them. Every term is on the longest path of the
step graph or below one that is, with the same prices, so a bound never exceeds the step time it bounds.

Memory. Constant state is counted as lowering counts it. Activations are a rank's forwards in flight times its smallest
stage, plus one pass's working set.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.plan.facets.overlap import AS_DECIDED
from meshwright.search.columns import CoreColumns, Exchanged, spread
from meshwright.search.exchanges import STORED
from meshwright.search.legal import as_decided, exchanges_once, most_layers, runs, together
from meshwright.search.parts import Inners
from meshwright.search.paths import KEPT, Paths
from meshwright.search.regions import Regions
from meshwright.search.space import (
    BALANCED,
    EVEN,
    Core,
    Inner,
    Piped,
    Space,
    State,
    inners,
    pipelines,
    states,
)
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: A bound may exceed the time it bounds by rounding, not by more than this share.
ROUNDING = 1e-9


class CoreScope(NamedTuple):
    """The parts of one core's region: its plans are their combinations, but for those that do not go together."""

    core: Core
    inners: Inners
    pipelines: tuple[Piped, ...]
    states: tuple[State, ...]
    num_layers: int

    @classmethod
    def of(cls, space: Space, core: Core, model: Model, cluster: Cluster, train: Train) -> CoreScope:
        """All of a core's plans."""
        return cls(
            core,
            inners(space, core, model, cluster, train),
            pipelines(space, core, model, train),
            states(space, core, cluster, train),
            model.num_layers,
        )

    def parts(self) -> list[CoreScope]:
        """The region in parts where what overlaps is left to schedules: each schedule with what it decides alone."""
        marked = [overlap for overlap in self.inners.overlaps if AS_DECIDED in overlap]
        if not marked:
            return [self]
        said = [rest.overlap if rest.overlap in marked else None for rest in self.inners.rests]
        out = []
        for overlap in (*marked, None):
            mine = np.array([one == overlap for one in said])[self.inners.rest]
            alone = self.inners.overlaps - {*marked} if overlap is None else frozenset({overlap})
            goes = [p for p in self.pipelines if overlap is None or as_decided(self.core.ep, overlap, p.schedule)]
            out.append(self._replace(inners=self.inners.take(mine, alone), pipelines=tuple(goes)))
        return [scope for scope in out if len(scope.inners) and scope.pipelines]

    def legal(self) -> np.ndarray:
        """Which parts go together, bool [A, B, C]: as :func:`meshwright.search.legal.legal` says of each."""
        shape = len(self.inners), len(self.pipelines), len(self.states)
        pairs = np.broadcast_to(_pairs(self.core.pp, self.pipelines, self.states), shape)
        rests, shares = self.inners.rests, self.inners.shares
        if self.inners.layers - {0}:
            layers = np.array([rest.recompute_layers for rest in rests], np.int64)[self.inners.rest]
            most = np.array([most_layers(self.core, piped, self.num_layers) for piped in self.pipelines], np.int64)
            pairs = pairs & (layers[:, None] <= most)[:, :, None]
        if shares - {EVEN} and any(state.zero >= 2 for state in self.states):
            shared = np.array([rest.shares != EVEN for rest in rests], bool)[self.inners.rest]
            once = np.array([exchanges_once(self.core, state) for state in self.states], bool)
            pairs = pairs & (once | ~shared[:, None])[:, None, :]
        if len(self.inners.overlaps) > 1 and any(AS_DECIDED in overlap for overlap in self.inners.overlaps):
            goes = np.array([_decided(self.core.ep, rest.overlap, self.pipelines) for rest in rests])
            pairs = pairs & goes[self.inners.rest][:, :, None]
        if any(isinstance(said, tuple) for said in shares):
            able = [[runs(self.core.pp, piped, rest.shares) for piped in self.pipelines] for rest in rests]
            pairs = pairs & np.array(able, bool).reshape(len(rests), -1)[self.inners.rest][:, :, None]
        return pairs

    def size(self) -> int:
        """Plans of the region."""
        legal = self.legal()
        return int(legal.sum()) if legal.strides[0] else len(self.inners) * int(legal[:1].sum())


@lru_cache(maxsize=4096)
def _decided(ep: int, overlap: tuple[str, ...], pipelines: tuple[Piped, ...]) -> np.ndarray:
    """Return the mask of schedules that go with given overlaps, bool [B]."""
    return np.array([as_decided(ep, overlap, piped.schedule) for piped in pipelines], bool)


@lru_cache(maxsize=4096)
def _pairs(pp: int, pipelines: tuple[Piped, ...], states: tuple[State, ...]) -> np.ndarray:
    """Return the mask of schedules that go with state parts, bool [B, C]."""
    among = set(states)
    rows: dict[tuple[str, bool], list[bool]] = {}  # chunks matter only as one or more
    for piped in pipelines:
        same = piped.schedule, piped.vpp > 1
        if same not in rows:
            rows[same] = [together(pp, piped, state, among) for state in states]
    pairs = [rows[piped.schedule, piped.vpp > 1] for piped in pipelines]
    return np.array(pairs, bool).reshape(len(pipelines), len(states))


def work_seconds(regions: Regions, scope: CoreScope, costs: CoreColumns) -> np.ndarray:
    """The busiest rank's passes [A, B] and those before its first: below :func:`compute_seconds`, with no schedule
    built; 0 where ranks are not alike or stages are assigned."""
    work = regions.work(scope.core, scope.pipelines)
    if work is None:
        return np.zeros((len(scope.inners), len(scope.pipelines)))
    return work.longest(costs.seconds, regions.host_s)


def compute_seconds(
    regions: Regions, scope: CoreScope, costs: CoreColumns, *, work_only: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Paths through the pipeline [A, B], and the blocks [A, B] of the smallest stage. `work_only`: only those paths
    that go through all passes of a rank."""
    core, rows = scope.core, regions.rows(scope.core, scope.pipelines, costs)
    out = np.empty((len(scope.inners), len(scope.pipelines)))
    if rows is not None:
        seconds = rows.longest(costs.seconds, costs.send, regions.host_s, work_only=work_only)
        return seconds, np.broadcast_to(rows.least, out.shape)
    least = np.empty(out.shape)
    for b, piped in enumerate(scope.pipelines):
        for settled, one, chosen in regions.alternatives(core, scope.inners, piped):
            held = regions.counts(core.pp * piped.vpp, settled.stages)
            least[chosen, b] = max(1, int(held[:, : regions.kinds].sum(axis=1).min()))
            if regions.alike:
                one_row = regions.rows(core, (settled,), costs)
                times, send = costs.seconds[:, chosen], costs.send[chosen]
                out[chosen, b] = one_row.longest(times, send, regions.host_s, work_only=work_only)[:, 0]
            else:
                out[chosen, b] = _unequal(regions, core, settled, costs, chosen, one, work_only=work_only)
    return out, least


def even_share(regions: Regions, core: Core, costs: CoreColumns) -> np.ndarray:
    """Seconds [A]: however layers and the batch are spread and passes ordered, some rank does its share of all work."""
    layers = np.array([*regions.model.layers_by_kind, 1, 1], float)
    return regions.train.global_batch // core.mb * spread(costs.whole, layers, regions.glances.groups_on(core))


def _unequal(
    regions: Regions, core: Core, piped: Piped, costs: CoreColumns, chosen: list[int], one: Inner, *, work_only: bool
) -> np.ndarray:
    """Seconds [chosen] of the slowest kind of slices: paths where each runs as many microbatches, else its busiest
    rank's work; assigned so that all kinds end together where shares are balanced."""
    even, kinds = regions.train.global_batch // (core.dp * core.mb), regions.kinds_of(core, one)
    if one.shares == EVEN:
        return np.max([_paths(regions, core, piped, costs, chosen, row, work_only) for _, row in kinds], axis=0)
    each = np.array([_microbatch(regions, core, piped, costs, chosen, row) for _, row in kinds])  # [kinds, chosen]
    if one.shares == BALANCED:
        return even * core.dp / (np.array([n for n, _ in kinds]) @ (1.0 / each))
    return (np.array(one.shares)[:, None] * each).max(axis=0)


def _paths(
    regions: Regions,
    core: Core,
    piped: Piped,
    costs: CoreColumns,
    chosen: list[int],
    row: tuple[int, ...],
    work_only: bool,
) -> np.ndarray:
    """The longest path [chosen] of a slice whose pipeline ranks are on the devices `row`."""
    rows = regions.paths(core, piped, costs, row)
    times = regions.stage_seconds(core, piped, costs, chosen, row, rows.stage_ranks)
    seconds = _passes(rows, times.min(axis=0), slice(None))
    if len(times) > 1:  # a row of work is one rank's, at its own speed
        for device in set(row):
            mine = rows.timed + np.flatnonzero(np.array(row) == device)
            held = regions.counts(core.pp * piped.vpp, piped.stages)
            seconds[:, mine] = _passes(rows, costs.each[device][:, chosen] @ held.T, mine)
    seconds += costs.send[chosen, None] * rows.sends + regions.host_s * rows.passes.sum(axis=(1, 2))
    return seconds[:, int(work_only) * rows.timed :].max(axis=1)


def _passes(rows: Paths, times: np.ndarray, which: slice | np.ndarray) -> np.ndarray:
    """Seconds [chosen, rows] of some rows under times [4, chosen, S] of F, BW, B, W."""
    passes = rows.passes[which]
    if rows.split:  # a full backward among them counts as B, which it is no faster than
        back = np.minimum(times[2], times[1]) @ passes[:, 1].T + times[3] @ passes[:, 2].T
    else:
        back = times[1] @ passes[:, 1].T
    return times[0] @ passes[:, 0].T + back


def _microbatch(
    regions: Regions, core: Core, piped: Piped, costs: CoreColumns, chosen: list[int], row: tuple[int, ...]
) -> np.ndarray:
    """Seconds [chosen] that the busiest rank of a slice takes for one microbatch at least."""
    rows = regions.paths(core, piped, costs, row)
    held = rows.held
    times = regions.stage_seconds(core, piped, costs, chosen, row, rows.stage_ranks).min(axis=0)
    whole = times[0] + np.minimum(times[1], times[2] + times[3])
    return (whole @ (held / held.sum(axis=0)).T).max(axis=1)


def step_seconds(
    regions: Regions, scope: CoreScope, costs: CoreColumns, paths_s: np.ndarray, least: np.ndarray, exchanged: Exchanged
) -> tuple[np.ndarray, np.ndarray]:
    """Lower bounds of the step time [A, B, C], from :func:`compute_seconds`; and those of them that are paths through
    the pipeline with what is around it, which a longer path makes as much longer."""
    core, kinds = scope.core, regions.kinds
    forward = costs.seconds[0][:, :kinds].min(axis=1)[:, None, None]
    whole = costs.seconds[1][:, :kinds]
    late = np.maximum(costs.slowest[1], costs.slowest[2] + costs.slowest[3])
    longest, embedding = late[:, :kinds].max(axis=1)[:, None, None], late[:, -2][:, None, None]
    rows = regions.rows(core, scope.pipelines, costs)
    split = rows.split if rows else np.array([_settled(regions, core, p, costs).split for p in scope.pipelines])
    weight = np.minimum(whole, costs.seconds[3][:, :kinds]).min(axis=1)[:, None]
    shortest = np.where(split, weight, whole.min(axis=1)[:, None])[:, :, None]  # of a pass that leaves gradients
    blocks = least[:, :, None]
    beside = np.where(blocks > 1, blocks, 0)  # a pass over one block is not cut, so nothing is overlapped with it
    gather = exchanged.gather.min(axis=2)[:, None, :]
    reduce = exchanged.reduce.min(axis=2)[:, None, :]
    slow = regions.contention if core.dp * core.cp > 1 and all("dp" in i.overlap for i in scope.inners) else 0.0
    before = exchanged.first[:, None, :] + slow * beside * np.minimum(gather, forward)
    pairs = np.stack(
        [
            regions.exchanges.paired(core, scope.inners, p, n, _settled(regions, core, p, costs))
            for p, n in zip(scope.pipelines, least.min(axis=0))
        ],
        axis=1,
    )
    # after the first release come the other blocks of that pass, the embedding and what the host adds to them
    passed = (blocks - 1) * longest + embedding + regions.host_s
    after = np.maximum(slow * beside * np.minimum(reduce, shortest) + reduce, blocks * reduce - passed)
    after = np.maximum(after, pairs[:, :, None])
    total = along = paths_s[:, :, None] + before + after + exchanged.last[:, None, :]
    if core.pp == 1 and core.dp * core.cp > 1:
        total = np.maximum(total, _every_microbatch(regions, scope, costs, paths_s, exchanged))
    again = [c for c, state in enumerate(scope.states) if state.zero == 2 and _sharded(core, state)]
    if core.pp > 1 and core.dp * core.cp > 1 and again:
        # a rank's dp queue takes every round's reductions, and slows the passes they are overlapped with
        scattered = rows.scattered if rows else _scattered(regions, scope, costs)
        slowed = (scattered[None, :, 0, None] * (beside > 0)) * slow * np.minimum(reduce, shortest)[:, :, again]
        slowed += compute_seconds(regions, scope, costs, work_only=True)[0][:, :, None]
        slowed += (before + exchanged.last[:, None, :])[:, :, again]
        queued = scattered[None, :, 1, None] * reduce[:, :, again] + exchanged.last[:, None, again]
        total = along.copy()
        total[:, :, again] = np.maximum(along[:, :, again], np.maximum(slowed, queued))
    return total, along


def _sharded(core: Core, state: State) -> bool:
    """Whether more than one rank shares the sharded state."""
    return (state.shard or core.dp * core.cp) > 1


def _settled(regions: Regions, core: Core, piped: Piped, costs: CoreColumns) -> Paths:
    """Return the paths of a schedule with even stages: its ranks and splits are the same whatever its stages hold."""
    return regions.paths(core, piped._replace(stages=EVEN), costs)


def _scattered(regions: Regions, scope: CoreScope, costs: CoreColumns) -> np.ndarray:
    """Blocks whose gradients the least and the most busy rank [B, 2] scatters in a step, as often as its rounds end."""
    out = []
    for piped in scope.pipelines:
        blocks = rounds = _settled(regions, scope.core, piped, costs).rounds
        if piped.stages == BALANCED:
            blocks = rounds.sum(axis=1)  # a stage holds a block at least
        else:
            held = regions.counts(scope.core.pp * piped.vpp, piped.stages)
            blocks = rounds @ held[:, : regions.kinds].sum(axis=1)
        out.append((blocks.min(), blocks.max()))
    return np.array(out)


def _every_microbatch(
    regions: Regions, scope: CoreScope, costs: CoreColumns, paths_s: np.ndarray, exchanged: Exchanged
) -> np.ndarray:
    """Return the bound in seconds without a pipeline, where sharded parameters are gathered and sharded gradients
    reduced for every microbatch."""
    core = scope.core
    count = regions.train.global_batch // (core.dp * core.mb)
    layers = count * np.array(regions.model.layers_by_kind, float)
    cut = regions.model.num_layers > 1 and all("dp" in i.overlap for i in scope.inners)
    slow = regions.contention if cut else 0.0
    out = np.zeros((len(scope.inners), 1, len(scope.states)))
    forward, backward = costs.seconds[0][:, : regions.kinds], costs.seconds[1][:, : regions.kinds]
    for c, state in enumerate(scope.states):
        gathers, reduces = (state.zero >= least and _sharded(core, state) for least in (3, 2))
        gather = exchanged.gather[:, c] * gathers
        reduce = exchanged.reduce[:, c] * reduces
        slowed = np.minimum(gather, forward) + np.minimum(gather + reduce, backward)
        beside = paths_s[:, 0] + slow * (slowed @ layers)
        queues = np.maximum(2 * gather @ layers, reduce @ layers)
        out[:, 0, c] = np.maximum(beside, queues) + exchanged.last[:, c]
    return out


def memory_bytes(regions: Regions, scope: CoreScope, costs: CoreColumns) -> np.ndarray:
    """Return lower bounds of the fullest rank's memory in bytes [A, B, C], with the framework's own memory."""
    core, framework, around = scope.core, regions.evaluator.costs.framework, regions.exchanges
    stored = scope.inners.grouped(*STORED)
    alike = [scope.inners[places[0]] for places in stored]
    which = np.empty(len(scope.inners), np.int64)
    for number, places in enumerate(stored):
        which[places] = number
    constant = np.array([[around.state_bytes(core, one, s) for s in scope.states] for one in alike])  # [P, C, U]
    unscattered = np.array([[around.unscattered_bytes(core, one, s) for s in scope.states] for one in alike])
    stay = np.array([around.keeps_activations(core, alike[0], s) for s in scope.states], float)[:, None]
    groups = sum(n > 1 for n in (core.tp, core.pp, core.dp * core.cp, core.ep, core.cp))
    out = np.empty((len(scope.inners), len(scope.pipelines), len(scope.states)))
    shared = np.array([inner.shares != EVEN for inner in scope.inners])
    for b, piped in enumerate(scope.pipelines):
        for settled, _, chosen in regions.alternatives(core, scope.inners, piped):
            stages = regions.counts(core.pp * piped.vpp, settled.stages)
            rows = _settled(regions, core, piped, costs)
            saved = costs.saved[chosen] @ stages.T  # [A, S]
            on_rank = np.where(rows.held[None] > 0, saved[:, None, :], np.inf).min(axis=2)  # [A, ranks]
            share = ((costs.held[chosen] @ stages.T) / np.maximum(saved, 1.0)).min(axis=1)
            level = np.searchsorted(KEPT[: len(rows.in_flight)], np.minimum(share, 1.0), side="right") - 1
            in_flight = rows.in_flight[level]
            if shared[chosen].any():  # how many microbatches a kind of slices runs is not known
                in_flight = np.where(shared[chosen, None], np.minimum(in_flight, 1.0), in_flight)
            kept = on_rank * in_flight + costs.working[chosen][:, : regions.kinds].min(axis=1)[:, None]
            state = constant @ (rows.held @ stages).T  # [P, C, ranks]
            if not rows.split:  # a full backward starts with most in flight, in a round of some stage on its rank
                whole = unscattered @ stages.T  # [P, C, S]
                state += np.where(rows.held > 0, whole[:, :, None, :], np.inf).min(axis=3)
            places = np.array(chosen)
            for number in range(len(alike)):
                mine = which[places] == number if len(alike) > 1 else slice(None)
                out[places[mine], b] = (kept[mine][:, None, :] * stay + state[number]).max(axis=2)
    return out * (1 + framework.allocator_slack) + groups * framework.communicator_bytes + framework.context_bytes
