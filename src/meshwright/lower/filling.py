"""Frozen layers run ahead of a step: a step's graph with their passes and messages among the tasks it has.

A plan with ``fill_layers=8`` does not train the first 8 layers of its model, and a model may have frozen layers of its
own (encoders of text and images before a diffusion model's network). Every pipeline rank holds all of them and runs
them forward for a part of its replica's samples, layer by layer: ahead of the step that reads what they make, while it
waits in the step before, whole microbatches at a time or in parts of them; or before all else in the step itself
(``filling=before``). Results travel to the rank of the first stage (DiffusionPipe, Tian et al., 2024, arXiv 2405.01248,
whose frozen encoders are filled so; its two backbones in one pipeline are not here).
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.graph import KIND, QUEUES, GraphBuilder, TaskGraph
from meshwright.layers.kind import Tokens
from meshwright.lower import Lowered
from meshwright.lower.bind import Binder
from meshwright.lower.place import Mesh
from meshwright.lower.program import Move, Program
from meshwright.lower.roles import PassRole
from meshwright.lower.stages import Stages
from meshwright.lower.state import static_bytes
from meshwright.lower.units import composition_of
from meshwright.plan import Plan
from meshwright.plan.facets.pipeline import BEFORE, PARTS, WAITS
from meshwright.plan.filling import num_frozen, way
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.parts import part_of
from meshwright.spec.workload import Train

#: Behind so many actions nothing of a step comes.
BEHIND_ALL = 1 << 40


class FrozenLayers(msgspec.Struct, frozen=True, kw_only=True):
    """The frozen layers on a rank: their ``stages`` (one, on every rank), a forward of each by the rows of a microbatch
    that pass it (``passes``), the ``sends`` of the result of ``chunk`` rows from each pipeline rank to the first (None
    from that one itself), and the ``result_bytes`` of a microbatch. ``way``: where passes go."""

    stages: Stages
    passes: dict[int, tuple[Program, ...]]
    sends: tuple[Program | None, ...]
    result_bytes: float
    chunk: int
    way: str

    @property
    def rows(self) -> int:
        """Rows of a microbatch."""
        return self.stages.plan.pipeline.microbatch

    @property
    def num_layers(self) -> int:
        """Segments that a pass goes through one by one: the layers."""
        return len(self.passes[self.rows])


class FrozenItems(msgspec.Struct, frozen=True, kw_only=True):
    """The passes to put into a graph, in the order in which each rank runs them, [items] each: the pipeline rank, the
    microbatch, the layer, the first row and the number of rows, whether a chunk's result is ``whole`` behind it, and
    where among the graph's tasks, on the scale on which ``when`` [tasks] orders those."""

    rank: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    layer: NDArray[np.int64]
    first: NDArray[np.int64]
    rows: NDArray[np.int64]
    whole: NDArray[np.bool_]
    at: NDArray[np.float64]
    when: NDArray[np.float64]


class FrozenPass(NamedTuple):
    """A pass of ``rows`` rows of a microbatch, from ``first`` on, through a frozen layer, run by a rank when it has
    begun so many of its schedule's ``actions``."""

    actions: int
    microbatch: int
    layer: int
    first: int
    rows: int


class FrozenOrder(msgspec.Struct, frozen=True):
    """The order in which each pipeline rank runs frozen layers: the schedule that both executors follow. ``chunk`` rows
    of a microbatch are encoded by one rank, layer by layer."""

    chunk: int
    ranks: tuple[tuple[FrozenPass, ...], ...]

    def begins(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(microbatch, first row) of the chunks of a rank, in order."""
        return tuple(dict.fromkeys((one.microbatch, one.first - one.first % self.chunk) for one in self.ranks[rank]))


class Filled(msgspec.Struct, frozen=True, kw_only=True):
    """How full the waits of a step are of frozen layers, seconds summed over the pipeline ranks of a replica:
    ``waits_s`` of the step that is trained (``trained_s`` long), ``frozen_s`` of all passes, ``inside_s`` of those in
    waits. ``layers`` are frozen, ``way`` says where their passes go; ``order``: what each rank runs, in order."""

    layers: int
    way: str
    trained_s: float
    waits_s: float
    frozen_s: float
    inside_s: float
    order: FrozenOrder = FrozenOrder(1, ())

    @property
    def share(self) -> float:
        """The share of the waits that is filled."""
        return self.inside_s / self.waits_s if self.waits_s else 0.0

    def to_json(self) -> dict[str, float | int | str]:
        """The numbers as plain values, without the order."""
        names = ("layers", "way", "trained_s", "waits_s", "frozen_s", "inside_s", "share")
        return {name: getattr(self, name) for name in names}


def chunk_of(filling: str, microbatch: int, count: int, pp: int) -> int:
    """Rows of a microbatch that one rank encodes: all of them in plain waits; else as many as give every pipeline rank
    the same number of rows of `count` microbatches, where that divides."""
    parts = pp // gcd(count, pp)
    return microbatch // parts if filling != WAITS and microbatch % parts == 0 else microbatch


def plain_order(plan: Plan, model: Model, train: Train) -> FrozenOrder:
    """The order of a plan whose step is not simulated: chunks dealt in turn, and their passes before all of a step's
    own actions, or behind them."""
    layout, mb, filling = plan.layout, plan.pipeline.microbatch, way(plan)
    count = plan.num_microbatches(train.global_batch)
    chunk = chunk_of(filling, mb, count, layout.pp)
    each = [(number, first) for number in range(count) for first in range(0, mb, chunk)]
    at = 0 if filling == BEFORE else BEHIND_ALL
    layers, ranks = range(num_frozen(plan, model)), []
    for rank in range(layout.pp):
        mine = each[rank :: layout.pp]
        ranks.append(tuple(FrozenPass(at, number, layer, first, chunk) for number, first in mine for layer in layers))
    return FrozenOrder(chunk, tuple(ranks))


def forwards(plan: Plan, part: Model, cluster: Cluster, train: Train, rows: int) -> tuple[Stages, tuple[Program, ...]]:
    """The frozen layers of a plan, as the only `part` of a model, and a forward of each for so many rows."""
    layout = plan.layout
    alone = msgspec.structs.replace(
        plan,
        layout=msgspec.structs.replace(layout, pp=1, dp=layout.dp * layout.pp, zero=0, shard=0, stages=()),
        pipeline=msgspec.structs.replace(plan.pipeline, fill=0, filling="", schedule="1f1b", vpp=1, microbatch=rows),
    )
    stages = Stages(alone, part, train, Mesh(alone, cluster), frozen=True)
    binder = Binder(stages, stages.mesh)
    (composition,) = stages.compositions
    parts = composition.segments
    return stages, tuple(binder(PassRole("F", units, 0, 0, (), 1 / len(parts))) for units in parts)


def frozen_layers(plan: Plan, model: Model, cluster: Cluster, train: Train, lowered: Lowered) -> FrozenLayers:
    """The frozen layers of a plan whose trained part is `lowered`."""
    layout, count, filling = plan.layout, num_frozen(plan, model), way(plan)
    mb = plan.pipeline.microbatch
    part = part_of(model, 0, count)
    chunk = chunk_of(filling, mb, plan.num_microbatches(train.global_batch), layout.pp)
    sizes = {mb, chunk} if filling != PARTS else {n for n in range(1, mb + 1) if mb % n == 0}
    passes, of = {}, {}
    for rows in sorted(sizes):
        of[rows], passes[rows] = forwards(plan, part, cluster, train, rows)
    stages = of[mb]
    tokens = Tokens(model=model, batch=of[chunk].batch, rows=chunk)
    carried = sum(s.count * s.hidden for s in map(tokens.at, model.carried(count)))
    c = stages.context()
    size = carried * c.element / (layout.tp * layout.cp)
    starts = lowered.mesh.slices[0].starts
    gathers = [Move("all_gather", size * c.tp, c.tp_group)] if c.tp > 1 and not c.sp else []
    sends: list[Program | None] = [None]
    for start in starts[1:]:
        moves = (Move("send", size, lowered.mesh.pair(start, starts[0])), *gathers)
        meeting = Binder(of[mb], of[mb].mesh).meeting
        sends.append(Program(kind="send", name="frozen result", site=meeting, moves=moves))
    held = size * (c.tp if gathers else 1) * mb / chunk
    return FrozenLayers(stages=stages, passes=passes, sends=tuple(sends), result_bytes=held, chunk=chunk, way=filling)


def filled(lowered: Lowered, frozen: FrozenLayers, items: FrozenItems) -> Lowered:
    """The step with the passes of the frozen layers at their places, and their results sent to the first stage."""
    graph, pp, n = lowered.graph, lowered.plan.layout.pp, lowered.graph.num_tasks
    builder = GraphBuilder(graph.streams.ranks)
    layers = [one for rows in frozen.passes.values() for one in rows]
    programs = (*lowered.programs, *layers, *(one for one in frozen.sends if one is not None))
    key = {program: i for i, program in enumerate(programs)}
    sent = np.flatnonzero(items.whole & (items.rank > 0))
    # a graph's tasks are in topological order, which those of equal times keep
    order = np.argsort(np.concatenate([items.when, items.at, items.at[sent]]), kind="stable")
    where = np.empty(len(order), np.int64)
    where[order] = np.arange(len(order))
    passes = [key[frozen.passes[rows][layer]] for rows, layer in zip(items.rows.tolist(), items.layer.tolist())]
    messages = [key[frozen.sends[rank]] for rank in items.rank[sent].tolist()]
    _copy(builder, graph, where, order, items, np.array(passes, np.int64), np.array(messages, np.int64), sent)
    own, moved = where[n : n + len(items.rank)], where[n + len(items.rank) :]
    builder.occupy(own, items.rank * len(QUEUES))  # their compute queues
    same = (items.rank[1:] == items.rank[:-1]) & (items.microbatch[1:] == items.microbatch[:-1])
    behind = 1 + np.flatnonzero(same & (items.layer[1:] > items.layer[:-1]))
    builder.depend(own[behind], own[behind - 1])
    forward = [builder.stream(rank, "link_forward") for rank in range(pp)]
    builder.occupy(moved, np.array(forward)[items.rank[sent]])
    builder.depend(moved, own[sent])
    if frozen.way == BEFORE:  # what the step itself reads
        _read(builder, graph, where, items, np.concatenate([own[items.whole & (items.rank == 0)], moved]))
    built = msgspec.structs.replace(builder.build(), keys=tuple(f"{p.name} #{i}" for i, p in enumerate(programs)))
    static = tuple(one | _held(frozen, lowered, rank % pp == 0) for rank, one in enumerate(lowered.static_bytes))
    return msgspec.structs.replace(lowered, graph=built, programs=programs, static_bytes=static, filled=frozen.stages)


def _read(
    builder: GraphBuilder, graph: TaskGraph, where: NDArray[np.int64], items: FrozenItems, made: NDArray[np.int64]
) -> None:
    """Have the first stage's forward of a microbatch wait for the results of its rows, `made` on its own rank first."""
    own, sent = items.whole & (items.rank == 0), items.whole & (items.rank > 0)
    of = np.concatenate([items.microbatch[own], items.microbatch[sent]])
    first = (graph.kind == KIND["F"]) & (graph.attribute("stage") == 0)
    for microbatch in np.unique(of).tolist():
        readers = np.flatnonzero(first & (graph.attribute("microbatch") == microbatch))
        for result in made[of == microbatch].tolist():
            builder.depend(where[readers], np.full(len(readers), result))


def _copy(
    builder: GraphBuilder,
    graph: TaskGraph,
    where: NDArray[np.int64],
    order: NDArray[np.int64],
    items: FrozenItems,
    passes: NDArray[np.int64],
    messages: NDArray[np.int64],
    sent: NDArray[np.int64],
) -> None:
    """Put the tasks of a graph, and those of the items with the messages of those `sent`, in their order, with all that
    is known of the graph's."""
    n, count = graph.num_tasks, len(items.rank)
    none = np.full(count + len(sent), -1)
    microbatch = np.concatenate([items.microbatch, items.microbatch[sent]])
    layer = np.concatenate([items.layer, np.full(len(sent), -1)])
    named = {"stage": none, "chunk": none, "step": none, "microbatch": microbatch, "layer": layer}
    kinds = np.repeat([KIND["F"], KIND["send"]], [count, len(sent)])
    builder.extend(
        np.concatenate([graph.kind, kinds])[order],
        np.concatenate([graph.cost_key, passes, messages])[order],
        **{name: np.concatenate([graph.attribute(name), column])[order] for name, column in named.items()},
    )
    streams = graph.streams.rank.astype(np.int64) * len(QUEUES) + graph.streams.queue
    task = np.repeat(np.arange(n), np.diff(graph.member_ptr))
    by_place = np.argsort(where[task], kind="stable")
    builder.occupy(where[task][by_place], streams[graph.member][by_place])
    after = np.repeat(np.arange(n), np.diff(graph.dep_ptr))
    builder.depend(where[after], where[graph.dep], graph.dep_lag)
    memory = graph.memory
    if memory is None:
        return
    for category, name in enumerate(memory.categories):
        for at_end in (False, True):
            for frees in (True, False):
                some = (memory.category == category) & (memory.at_end == at_end) & ((memory.num_bytes < 0) == frees)
                if some.any():
                    tasks = where[memory.task[some]]
                    builder.memory(tasks, memory.rank[some], at_end, memory.num_bytes[some], name)


def _held(frozen: FrozenLayers, lowered: Lowered, first: bool) -> dict[str, float]:
    """Bytes of the frozen layers on a rank: weights and what a layer's forward makes; on the rank of the first stage
    the results that a step reads and those that it is given for the next, as if all were there at once."""
    stages = frozen.stages
    (composition,) = stages.compositions
    weights = static_bytes(stages.plan, stages.train, stages.total_params(composition.units))["parameters"]
    working = max(stages.activations(composition_of(units)).saved for units in composition.segments)
    out = {"frozen parameters": weights, "frozen activations": working}
    count = lowered.plan.num_microbatches(stages.train.global_batch)
    steps = 1 if frozen.way == BEFORE else 2
    return out | ({"frozen results": steps * count * frozen.result_bytes} if first else {})
