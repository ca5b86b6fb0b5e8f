"""Passes 7 and 8: what data-parallel ranks exchange, and the optimizer.

Gradients are reduced segment by segment as the last backward releases them (or after every microbatch when they
are sharded), parameters gathered before they are used. Collectives join the slice classes they span, so the
slowest slice holds the others up, as it does in reality.
"""

from __future__ import annotations

import numpy as np

from meshwright.graph import KIND, GraphBuilder
from meshwright.lower.place import Mesh
from meshwright.lower.stages import Stages, Unit
from meshwright.lower.state import STORED_BYTES
from meshwright.lower.step import Compute, Exchange, Tables, Update, exchange_mode, first_of, last_of
from meshwright.schedules.actions import BW, Actions, B, F, W
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


class Exchanger:
    """Adds the data-parallel tasks of one plan to a builder."""

    def __init__(self, builder: GraphBuilder, tables: Tables, actions: Actions, stages: Stages, mesh: Mesh):
        self.builder, self.tables, self.actions, self.stages, self.mesh = builder, tables, actions, stages, mesh
        self.plan, self.layout = stages.plan, stages.plan.layout
        self.gathers, self.reduces = exchange_mode(stages)

    def add(self, computes: list[Compute]) -> None:
        """All exchanges of the step, then gradient norm and optimizer, then the gather that is left."""
        if self.layout.dp * self.layout.cp > 1:
            self._gather_ahead(computes)
            self._reduce(computes)
        self._pair_up(computes)
        norm = self._norm(computes)
        self._update(computes, norm)

    def _pass_tasks(self, compute: Compute, kinds: tuple[int, ...], *, first: bool, last: bool) -> np.ndarray:
        """Positions in ``compute.task`` of the tasks that exchange: all of these kinds, or those of the first or last
        action of every (rank, stage)."""
        among = np.isin(self.actions.kind, kinds)
        chosen = first_of(self.actions, among) if first else last_of(self.actions, among) if last else among
        return np.flatnonzero(chosen[compute.action])

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
        at = self._pass_tasks(computes[0], kinds, first=not self.gathers, last=False)
        gathers = self._collective("all_gather", computes, at, "gather", "dp_gather")
        for compute in computes:
            self.builder.depend(compute.task[at], gathers)
        ahead = PREFETCH if self.plan.overlap.dp else 1
        if self.gathers and len(at) > ahead:
            rank = self.actions.rank_of()[computes[0].action[at]]
            same = rank[ahead:] == rank[:-ahead]
            for compute in computes:
                self.builder.depend(gathers[ahead:][same], compute.task[at][:-ahead][same])

    def _reduce(self, computes: list[Compute]) -> None:
        """Gradients reduced as they become final."""
        kinds = (W, BW)
        if self.plan.overlap.dp or self.reduces:
            at = self._pass_tasks(computes[0], kinds, first=False, last=not self.reduces)
            after = [compute.task[at] for compute in computes]
        else:
            among = self._pass_tasks(computes[0], kinds, first=False, last=True)
            rank = self.actions.rank_of()[computes[0].action[among]]
            at, after = among, [compute.done[rank] for compute in computes]
        reduces = self._collective("reduce_scatter", computes, at, "reduce", "dp")
        for tasks in after:
            self.builder.depend(reduces, tasks)
        if self.reduces and not self.plan.overlap.dp:
            for compute in computes:
                following = compute.task[at] + 1
                inside = np.isin(following, compute.task)
                self.builder.depend(following[inside], reduces[inside])

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
