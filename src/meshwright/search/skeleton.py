"""Skeleton: the step graph of all plans that differ in durations and sizes only.

Which task waits for which depends on the schedule, the layers of each stage and what is exchanged when, not on how
wide tensor parallelism is or where the ranks are. A skeleton is lowered once, from one plan; for another plan of the
same structure :meth:`Skeleton.keys` says what each task's cost key is there, and the engine re-times the same graph.
The times are bit for bit those of lowering the other plan, as a longest path does not depend on who built it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.graph import KIND, QUEUE, TaskGraph
from meshwright.lower import Lowered
from meshwright.lower.exchange import Exchanger, exchange_of
from meshwright.lower.place import Mesh
from meshwright.lower.residency import IN_FLIGHT, KEPT, LOGITS
from meshwright.lower.stages import Stages, Unit
from meshwright.lower.state import STORED_BYTES, Activations, unscattered_bytes
from meshwright.lower.step import Exchange, Key, Pass, Send, Update, gathers_again
from meshwright.plan import Plan
from meshwright.schedules.actions import Actions, W
from meshwright.spec.model import Model

_PASSES = (KIND["F"], KIND["B"], KIND["W"], KIND["BW"])
_EXCHANGES = {KIND["all_gather"]: "gather", KIND["reduce_scatter"]: "reduce"}


class Message(NamedTuple):
    """A role: a send between two pipeline ranks."""

    source: int
    target: int


class Moved(NamedTuple):
    """A role: parameters gathered or gradients reduced of some layers."""

    units: tuple
    what: str


class Updated(NamedTuple):
    """A role: the optimizer of one pipeline rank."""

    rank: int


class Paired(NamedTuple):
    """A role: gradients of a stage that two ranks hold, added up."""

    units: tuple
    ranks: tuple[int, int]


#: The gradient norm, which joins all ranks.
NORM = "norm"
PAIRED = -2
Role = Pass | Message | Moved | Updated | Paired | str


def structure(plan: Plan, model: Model, num_microbatches: int) -> tuple | None:
    """What plans must agree on to share a skeleton; None where a plan is lowered on its own.

    On their own: a tied embedding whose copies are on two pipeline ranks (their exchange is sized by the plan), and
    gradients exchanged in the open (their tasks do not follow the passes that release them).
    """
    layout, replicas = plan.layout, plan.layout.dp * plan.layout.cp
    if layout.pp > 1 and model.tied_embeddings:
        return None
    if replicas > 1 and not plan.overlap.dp:
        return None
    return (
        layout.pp,
        layout.stages,
        plan.pipeline.schedule,
        plan.pipeline.vpp,
        num_microbatches,
        plan.memory.recompute,
        plan.memory.layers,
        replicas > 1,
        layout.zero >= 1,
        gathers_again(layout),
        layout.shards_gradients,
        plan.overlap,
    )


class Skeleton:
    """One structure, from the first plan lowered with it."""

    def __init__(self, lowered: Lowered):
        graph, stages = lowered.graph, lowered.stages
        self.actions: Actions = lowered.actions
        self.roles, role_of = _roles(lowered)
        self.graph = msgspec.structs.replace(graph, cost_key=role_of, keys=tuple(map(str, self.roles)))
        self.compositions = stages.compositions
        distinct = {composition: i for i, composition in enumerate(dict.fromkeys(self.compositions))}
        self.distinct = tuple(distinct)
        self._distinct = np.array([distinct[composition] for composition in self.compositions])
        self.pp = stages.plan.layout.pp
        #: The units on each rank; equal ones are one object.
        same: dict[tuple[Unit, ...], tuple[Unit, ...]] = {}
        held = [[s for s, ranks in enumerate(self.actions.stage_ranks) if r in ranks] for r in range(self.pp)]
        units = (tuple(u for s in stages_of for u in self.compositions[s].units) for stages_of in held)
        self._held = [same.setdefault(one, one) for one in units]
        self._events()

    def _events(self) -> None:
        """What each memory event is: a code (see :meth:`with_bytes`) and a stage."""
        graph, memory = self.graph, self.graph.memory
        split = bool(np.any(self.actions.kind == W))
        kind = graph.kind[memory.task]
        workspace = memory.category == memory.categories.index("workspace")
        freed_by = np.where(kind == KIND["W"], 1, np.where((kind == KIND["B"]) & split, 2, 3))
        code = np.where(workspace, np.where(memory.at_end, 5, 4), np.where(kind == KIND["F"], 0, freed_by))
        if LOGITS in memory.categories:
            mine = memory.category == memory.categories.index(LOGITS)
            code = np.where(mine, np.where(memory.at_end, 7, 6), code)
        self._code, stage = code, graph.attribute("stage")[memory.task]
        self._made = self._distinct[stage]
        self._gradients: dict[tuple, int] = {}
        self._scattered: list[tuple[int, int]] = []
        if IN_FLIGHT in memory.categories:
            for event in np.flatnonzero(memory.category == memory.categories.index(IN_FLIGHT)).tolist():
                task = memory.task[event]
                role = self.roles[graph.cost_key[task]]
                units = role.units if memory.at_end[event] else self.compositions[stage[event]].units
                self._scattered.append((event, self._gradients.setdefault(units, len(self._gradients))))

    def with_bytes(self, kept: list[Activations], stages: Stages) -> TaskGraph:
        """The graph with the sizes of what each of the ``distinct`` compositions keeps."""
        saved, held, working, logits = (np.array([getattr(a, f) for a in kept]) for f in KEPT)
        saved = saved - logits
        table = np.stack((saved, -held, held - saved, 0.0 - saved, working, -working, logits, -logits))
        num_bytes = table[self._code, self._made]
        if self._scattered:
            whole = np.array([unscattered_bytes(stages.plan, stages.total_params(units)) for units in self._gradients])
            event, units = np.array(self._scattered).T
            num_bytes[event] = np.where(self.graph.memory.at_end[event], 0.0 - whole[units], whole[units])
        memory = msgspec.structs.replace(self.graph.memory, num_bytes=num_bytes)
        return msgspec.structs.replace(self.graph, memory=memory)

    def keys(self, stages: Stages, mesh: Mesh) -> list[Key]:
        """The cost key of every role for a plan of this structure."""
        starts, device = mesh.slices[0].starts, mesh.slices[0].devices[0].name
        updates = Updates(stages)
        everyone = mesh.group("tp", "cp", "dp", "pp")
        found: list[Key] = []
        for role in self.roles:
            match role:
                case Pass():
                    found.append(role)
                case Message(a, b):
                    found.append(Send(mesh.pair(starts[a], starts[b])))
                case Moved(units, what):
                    found.append(exchange_of(stages, mesh, units, what))
                case Paired(units, (a, b)):
                    params = stages.total_params(units)
                    size = (params.trained_dense + params.trained_expert) * STORED_BYTES[stages.plan.precision.grads]
                    found.append(Exchange((("all_reduce", size, mesh.pair(starts[a], starts[b])),)))
                case Updated(r):
                    found.append(Update(updates.parameters(self._held[r]), device))
                case _:
                    found.append(Exchange((("all_reduce", 4.0, everyone),)))
        return found


class Updates(Exchanger):
    """Asked only for what an optimizer step touches; it adds nothing to a graph."""

    def __init__(self, stages: Stages):
        super().__init__(None, None, [None], stages, stages.mesh)

    def parameters(self, units: tuple[Unit, ...]) -> float:
        """Parameters that the optimizer of a rank with these units touches."""
        return self._updated(units)


def _roles(lowered: Lowered) -> tuple[list[Role], np.ndarray]:
    """The distinct roles of the tasks, and each task's. Every role has one cost key, whatever the plan."""
    graph, keys = lowered.graph, lowered.keys
    rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    beside = _neighbours(lowered)
    roles: dict[Role, int] = {}
    role_of = np.empty(graph.num_tasks, np.int32)
    # tasks that agree on these columns are one role
    same = graph.kind.astype(np.int64)
    for column in (graph.cost_key, rank, beside - beside.min()):
        same = same * (int(column.max()) + 1) + column
    _, first, back = np.unique(same, return_index=True, return_inverse=True)
    for i, task in enumerate(first.tolist()):
        kind, key, other = int(graph.kind[task]), keys[graph.cost_key[task]], int(beside[task])
        if kind in _PASSES:
            role: Role = key
        elif kind == KIND["send"]:
            role = Message(int(rank[task]), other)
        elif kind in _EXCHANGES:
            role = Moved(keys[other].units, _EXCHANGES[kind])
        elif kind == KIND["optimizer"]:
            role = Updated(int(rank[task]))
        elif other < -1:
            stage = PAIRED - other
            role = Paired(lowered.stages.compositions[stage].units, lowered.actions.stage_ranks[stage])
        else:
            role = NORM
        first[i] = roles.setdefault(role, len(roles))
    role_of[:] = first[back.reshape(-1)]
    return list(roles), role_of


def _neighbours(lowered: Lowered) -> np.ndarray:
    """For a send the rank it goes to, for an exchange the cost key of the pass it belongs to, for gradients that two
    ranks add up ``PAIRED`` less their stage, else -1."""
    graph = lowered.graph
    owner = np.repeat(np.arange(graph.num_tasks), np.diff(graph.dep_ptr))
    is_pass = np.isin(graph.kind, _PASSES)
    rank = graph.streams.rank[graph.member[graph.member_ptr[:-1]]]
    queue = graph.streams.queue[graph.member[graph.member_ptr[:-1]]]
    out = np.full(graph.num_tasks, -1, np.int64)
    before, after = graph.dep, owner
    # without overlap the sender's own next pass waits too
    sent = (graph.kind[before] == KIND["send"]) & is_pass[after] & (rank[after] != rank[before])
    out[before[sent]] = rank[after[sent]]
    gathered = (graph.kind[before] == KIND["all_gather"]) & is_pass[after]
    out[before[gathered]] = graph.cost_key[after[gathered]]
    reduced = (queue[after] == QUEUE["dp"]) & (graph.kind[after] == KIND["reduce_scatter"]) & is_pass[before]
    out[after[reduced]] = graph.cost_key[before[reduced]]
    left: dict[tuple[int, ...], list[int]] = {}
    for stage, both in enumerate(lowered.actions.stage_ranks):
        left.setdefault(both, []).append(stage)
    for task in np.flatnonzero(graph.kind == KIND["all_reduce"]).tolist():
        members = graph.member[graph.member_ptr[task] : graph.member_ptr[task + 1]]
        stages = left.get(tuple(sorted(graph.streams.rank[members].tolist())), [])
        if len(members) == 2 and stages:  # stage by stage on one pair's streams; the norm comes after them
            out[task] = PAIRED - stages.pop(0)
    return out
