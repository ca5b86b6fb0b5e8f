"""Passes 7 and 8: what data-parallel ranks exchange, and the optimizer.

Gradients are reduced segment by segment as the last backward releases them (or after every microbatch when they
are sharded), parameters gathered before they are used. Collectives join the slice classes they span, so the
slowest slice holds the others up, as it does in reality.
"""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.graph import KIND, GraphBuilder
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages, Unit
from meshwright.lower.state import STORED_BYTES
from meshwright.lower.step import Compute, Exchange, Tables, Update, first_of, gathers_again, reduced_after, rounds
from meshwright.schedules.actions import BW, Actions, B, F
from meshwright.spec.workload import DTYPE_BYTES
from meshwright.work import Group

#: A sharded parameter's gathered copy is prefetched at most this many layers ahead, as FSDP limits it.
PREFETCH = 2


def exchange_of(stages: Stages, mesh: Mesh, units: tuple[Unit, ...], what: str, rank: int = 0) -> Exchange:
    """The collectives that "gather" the parameters or "reduce" the gradients of some layers `rank` holds: dense ones
    over dp*cp, experts over their replicas."""
    start = _first_of_group(mesh, rank)
    found = stages.exchanges.get((units, what, start))
    if found is None:
        found = stages.exchanges[units, what, start] = _exchange_of(stages, mesh, units, what, start)
    return found


def _first_of_group(mesh: Mesh, rank: int) -> int:
    """Where the replicas of a rank begin; 0 where it does not matter because all islands are alike."""
    if len(mesh.cluster.islands) == 1:
        return 0
    for axis in ("cp", "dp"):
        stride = mesh.layout.stride(axis)
        rank -= rank // stride % getattr(mesh.layout, axis) * stride
    return rank


def _exchange_of(stages: Stages, mesh: Mesh, units: tuple[Unit, ...], what: str, start: int) -> Exchange:
    plan, params = stages.plan, stages.total_params(units)
    shard_group, replica_group = mesh.hybrid_groups(plan.layout.shard_group, "cp", "dp", start=start)
    grad_bytes = STORED_BYTES[plan.precision.grads]
    compute = plan.precision.compute or stages.train.dtype
    weight_bytes = 4.0 if compute == "fp32" else 2.0
    if plan.precision.params == "fp8":
        weight_bytes = min(weight_bytes, max(1.0, DTYPE_BYTES[compute]))
    steps: list[tuple[str, float, Group]] = []
    for trained, held, group in (
        (params.trained_dense, params.dense, shard_group),
        (params.trained_expert, params.expert, mesh.expert_group("edp", start=start)),
    ):
        if what == "gather" and held and group.size > 1:
            size = held if plan.layout.zero == 3 else trained
            steps.append(("all_gather", size * weight_bytes, group))
        elif what == "reduce" and trained and group.size > 1:
            op = "reduce_scatter" if plan.layout.zero >= 1 else "all_reduce"
            steps.append((op, trained * grad_bytes, group))
    if what == "reduce" and params.trained_dense and replica_group.size > 1:
        steps.append(("all_reduce", params.trained_dense * grad_bytes / shard_group.size, replica_group))
    return Exchange(tuple(s for s in steps if s[1] > 0))


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """The reductions of a step: their tasks, the pipeline rank of each, and what layers it scatters."""

    task: np.ndarray = np.empty(0, np.int64)
    rank: np.ndarray = np.empty(0, np.int64)
    units: tuple[tuple[Unit, ...], ...] = ()


class Exchanger:
    """Adds the data-parallel tasks of one plan to a builder."""

    def __init__(self, builder: GraphBuilder, tables: Tables, orders: list[Actions], stages: Stages, mesh: Mesh):
        self.builder, self.tables, self.orders, self.stages, self.mesh = builder, tables, orders, stages, mesh
        self.actions = orders[0]
        self.plan, self.layout = stages.plan, stages.plan.layout
        self.gathers = gathers_again(self.layout)

    def add(self, computes: list[Compute]) -> Reduced:
        """All exchanges of the step, then gradient norm and optimizer, then the gather that is left; what was
        reduced."""
        reduced = Reduced()
        if self.layout.dp * self.layout.cp > 1:
            self._gather_ahead(computes)
            reduced = self._reduce(computes)
        self._pair_up(computes)
        norm = self._norm(computes)
        self._update(computes, norm)
        return reduced

    def _units(self, compute: Compute, at: np.ndarray) -> list[tuple[Unit, ...]]:
        """What the tasks at these positions compute with."""
        whole = np.bincount(compute.action)[compute.action[at]] == 1
        places = zip(self.actions.stage[compute.action[at]].tolist(), np.where(whole, -1, compute.segment[at]).tolist())
        found = self.stages.compositions
        return [found[stage].units if seg < 0 else found[stage].segments[seg] for stage, seg in places]

    def _keys(self, compute: Compute, at: np.ndarray, what: str) -> np.ndarray:
        """Cost keys for exchanging what the tasks at these positions compute with."""
        stage, action = self.actions.stage[compute.action[at]], compute.action[at]
        counts = np.bincount(compute.action)
        whole = counts[action] == 1
        segment = np.where(whole, -1, compute.segment[at])
        rank, pp, starts = self.actions.rank_of()[action].astype(np.int64), self.layout.pp, self.mesh.slices[0].starts
        distinct, back = np.unique((stage * pp + rank) * 100_000 + segment + 1, return_inverse=True)
        keys = []
        for value in distinct.tolist():
            place, seg = divmod(value, 100_000)
            composition = self.stages.compositions[place // pp]
            units = composition.units if seg == 0 else composition.segments[seg - 1]
            keys.append(self.tables(exchange_of(self.stages, self.mesh, units, what, starts[place % pp])))
        return np.array(keys)[back] if keys else np.empty(0, np.int64)

    def _gather_ahead(self, computes: list[Compute]) -> None:
        """Parameters gathered before the passes that use them."""
        if self.layout.zero == 0 or (self.layout.zero < 3 and not self.plan.overlap.dp):
            return
        kinds = (F, B, BW) if self.gathers else (F,)
        chosen = [np.isin(actions.kind, kinds) for actions in self.orders]
        if not self.gathers:
            chosen = [first_of(actions, among) for actions, among in zip(self.orders, chosen)]
        places = self._places(computes, chosen)
        at = places[0]
        gathers = self._collective("all_gather", computes, at, "gather", "dp_gather")
        for compute, mine in zip(computes, places):
            self.builder.depend(compute.task[mine], gathers)
        ahead = PREFETCH if self.plan.overlap.dp else 1
        if self.gathers and len(at) > ahead:
            rank = self.actions.rank_of()[computes[0].action[at]]
            same = rank[ahead:] == rank[:-ahead]
            for compute in computes:
                self.builder.depend(gathers[ahead:][same], compute.task[at][:-ahead][same])

    def _reduce(self, computes: list[Compute]) -> Reduced:
        """Gradients reduced as they become final, or after every round where they are sharded."""
        scattered = self.layout.shards_gradients
        places = self._places(computes, [reduced_after(actions, self.layout) for actions in self.orders])
        at, rank = places[0], self.actions.rank_of()[computes[0].action]
        open_ = not self.plan.overlap.dp
        after = [
            compute.done[rank[at]] if open_ and not scattered else compute.task[mine]
            for compute, mine in zip(computes, places)
        ]
        reduces = self._collective("reduce_scatter", computes, at, "reduce", "dp")
        for tasks in after:
            self.builder.depend(reduces, tasks)
        if scattered and open_:
            goes_on = np.flatnonzero(rank[at] == np.append(rank[1:], -1)[at])
            for compute in computes:
                self.builder.depend(compute.task[at[goes_on] + 1], reduces[goes_on])
        elif scattered and self.layout.pp > 1:
            self._wait_for_room(computes, at, reduces)
        return Reduced(task=reduces, rank=rank[at], units=tuple(self._units(computes[0], at)))

    def _wait_for_room(self, computes: list[Compute], at: np.ndarray, reduces: np.ndarray) -> None:
        """A round starts when the one before the last is scattered: a rank has two stages' gradients whole at most."""
        begins = np.flatnonzero(rounds(self.actions)[0])
        rank = self.actions.rank_of()[begins]
        last = reduces[np.append(np.flatnonzero(np.diff(computes[0].action[at])), len(at) - 1)]  # of every round
        later = np.flatnonzero(rank[2:] == rank[:-2])
        for compute in computes:
            first = compute.task[np.searchsorted(compute.action, begins)]
            self.builder.depend(first[2:][later], last[:-2][later])

    def _places(self, computes: list[Compute], chosen: list[np.ndarray]) -> list[np.ndarray]:
        """Positions in every ``compute.task`` of the tasks of the chosen actions, those that exchange with each other
        at one place. Slices with other numbers of microbatches have the same exchanges, of every (rank, stage)."""
        places = [np.flatnonzero(mask[compute.action]) for mask, compute in zip(chosen, computes)]
        if not self.layout.shares:
            return places
        out = []
        for actions, compute, at in zip(self.orders, computes, places):
            what = compute.action[at]
            out.append(at[np.lexsort((compute.segment[at], actions.stage[what], actions.rank_of()[what]))])
        back = np.argsort(out[0])  # in the first slices' own order
        return [at[back] for at in out]

    def _collective(self, kind: str, computes: list[Compute], at: np.ndarray, what: str, queue: str) -> np.ndarray:
        first = computes[0]
        action = first.action[at]
        rank, pp = self.actions.rank_of()[action], self.layout.pp
        ids = self.builder.extend(
            KIND[kind],
            self._keys(first, at, what),
            stage=self.actions.stage[action],
            microbatch=self.actions.microbatch[action],
            layer=first.segment[at],
        )
        for index in range(len(computes)):
            streams = np.array([self.builder.stream(index * pp + r, queue) for r in range(pp)])
            self.builder.occupy(ids, streams[rank])
        return ids

    def _pair_up(self, computes: list[Compute]) -> None:
        """Copies of one weight on two ranks of a pipeline are summed: a stage that runs in both directions, and a
        tied embedding whose head is on another rank."""
        pp, actions = self.layout.pp, self.actions
        table = self.stages.model.vocab * (self.stages.model.embedding_width or self.stages.model.hidden)
        grad_bytes = STORED_BYTES[self.plan.precision.grads]
        pairs = []
        for stage, ranks in enumerate(actions.stage_ranks):
            if len(ranks) == 2:
                params = self.stages.total_params(self.stages.compositions[stage].units)
                pairs.append((ranks, (params.trained_dense + params.trained_expert) * grad_bytes))
        ends = actions.stage_ranks[0][0], actions.stage_ranks[-1][-1]
        if self.stages.model.tied_embeddings and not self.stages.ends_meet and self.stages.train.lora is None:
            pairs.append((ends, table / self.layout.tp * grad_bytes))
        for (a, b), size in pairs:
            for index, compute in enumerate(computes):
                starts = self.mesh.slices[index].starts
                key = self.tables(Exchange((("all_reduce", size, self.mesh.pair(starts[a], starts[b])),)))
                ids = self.builder.extend(KIND["all_reduce"], key, stage=0)
                for r in (a, b):
                    self.builder.occupy(ids, [self.builder.stream(index * pp + r, "dp")])
                    self.builder.depend(ids, [compute.done[r]])

    def _norm(self, computes: list[Compute]) -> int:
        """The gradient norm joins every rank: nobody updates before the slowest has its gradients."""
        everyone = self.mesh.group("tp", "cp", "dp", "pp")
        key = self.tables(Exchange((("all_reduce", 4.0, everyone),)))
        ids = self.builder.extend(KIND["all_reduce"], key)
        for index, compute in enumerate(computes):
            for r in range(self.layout.pp):
                self.builder.occupy(ids, [self.builder.stream(index * self.layout.pp + r, "dp")])
                self.builder.depend(ids, [compute.done[r]])
        return int(ids[0])

    def _update(self, computes: list[Compute], norm: int) -> None:
        """The optimizer on every rank, then the parameters' gather when nothing else hides it."""
        pp, late = self.layout.pp, self.layout.zero in (1, 2) and not self.plan.overlap.dp
        for r in range(pp):
            held = [s for s, ranks in enumerate(self.actions.stage_ranks) if r in ranks]
            units = tuple(u for s in held for u in self.stages.compositions[s].units)
            updates = []
            for index in range(len(computes)):
                key = self.tables(Update(self._updated(units), self.mesh.slices[index].devices[r].name))
                stream = self.builder.stream(index * pp + r, "compute")
                updates.append(self.builder.extend(KIND["optimizer"], key, stream=[stream]))
                self.builder.depend(updates[-1], [norm])
            if late and self.layout.dp * self.layout.cp > 1:
                start = self.mesh.slices[0].starts[r]
                gather = self.builder.extend(
                    KIND["all_gather"], self.tables(exchange_of(self.stages, self.mesh, units, "gather", start))
                )
                for index, update in enumerate(updates):
                    self.builder.occupy(gather, [self.builder.stream(index * pp + r, "dp_gather")])
                    self.builder.depend(gather, update)

    def _updated(self, units: tuple[Unit, ...]) -> float:
        """Parameters one rank's optimizer touches."""
        params = self.stages.total_params(units)
        layout = self.layout
        expert_shard = min(layout.shard or self.plan.edp, self.plan.edp)
        share = (layout.shard_group, expert_shard) if layout.zero else (1, 1)
        return params.trained_dense / share[0] + params.trained_expert / share[1]
