"""Frozen layers in the waits of a pipeline: a step's graph with their passes and messages among the tasks it has.

A plan with ``fill_layers=8`` does not train the first 8 layers of its model. Every pipeline rank holds all of them and
runs them forward for a part of its replica's microbatches, layer by layer, ahead of the step that reads what they make:
while it waits in the step before. Results travel to the rank of the first stage (DiffusionPipe, Tian et al., MLSys
2024, whose frozen encoders are filled so; its partial batches and its two backbones in one pipeline are not here).
"""

from __future__ import annotations

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
from meshwright.plan.filling import without_frozen
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.parts import part_of
from meshwright.spec.workload import Train


class FrozenLayers(msgspec.Struct, frozen=True, kw_only=True):
    """The frozen layers on a rank: their ``stages`` (one, on every rank), a forward ``passes`` of a microbatch through
    each, the ``sends`` of a result from each pipeline rank to the first (None from that one itself), and the
    ``result_bytes`` of a microbatch."""

    stages: Stages
    passes: tuple[Program, ...]
    sends: tuple[Program | None, ...]
    result_bytes: float


class FrozenItems(msgspec.Struct, frozen=True, kw_only=True):
    """The passes to put into a graph, in the order in which each rank runs them, [items] each: the pipeline rank, the
    microbatch, the layer, and where among the graph's tasks, on the scale on which ``when`` [tasks] orders those."""

    rank: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    layer: NDArray[np.int64]
    at: NDArray[np.float64]
    when: NDArray[np.float64]


def frozen_layers(plan: Plan, model: Model, cluster: Cluster, train: Train, lowered: Lowered) -> FrozenLayers:
    """The frozen layers of a plan whose trained part is `lowered`."""
    layout, count = plan.layout, plan.pipeline.fill
    alone = msgspec.structs.replace(
        without_frozen(plan),
        layout=msgspec.structs.replace(layout, pp=1, dp=layout.dp * layout.pp, zero=0, shard=0, stages=()),
        pipeline=msgspec.structs.replace(plan.pipeline, fill=0, schedule="1f1b", vpp=1),
    )
    stages = Stages(alone, part_of(model, 0, count), train, Mesh(alone, cluster), frozen=True)
    binder = Binder(stages, stages.mesh)
    (composition,) = stages.compositions
    parts = composition.segments
    passes = tuple(binder(PassRole("F", units, 0, 0, (), 1 / len(parts))) for units in parts)
    tokens = Tokens(model=model, batch=stages.batch, rows=plan.pipeline.microbatch)
    carried = sum(s.count * s.hidden for s in map(tokens.at, model.carried(count)))
    c = stages.context()
    size = carried * c.element / (layout.tp * layout.cp)
    starts = lowered.mesh.slices[0].starts
    gathers = [Move("all_gather", size * c.tp, c.tp_group)] if c.tp > 1 and not c.sp else []
    sends: list[Program | None] = [None]
    for start in starts[1:]:
        moves = (Move("send", size, lowered.mesh.pair(start, starts[0])), *gathers)
        sends.append(Program(kind="send", name="frozen result", site=binder.meeting, moves=moves))
    held = size * (c.tp if gathers else 1)
    return FrozenLayers(stages=stages, passes=passes, sends=tuple(sends), result_bytes=held)


def filled(lowered: Lowered, frozen: FrozenLayers, items: FrozenItems) -> Lowered:
    """The step with the passes of the frozen layers at their places, and their results sent to the first stage."""
    graph, pp = lowered.graph, lowered.plan.layout.pp
    builder = GraphBuilder(graph.streams.ranks)
    programs = (*lowered.programs, *frozen.passes, *(one for one in frozen.sends if one is not None))
    key = {program: i for i, program in enumerate(programs)}
    # a graph's tasks are in topological order, which those of equal times keep
    order = np.argsort(np.concatenate([items.when, items.at]), kind="stable")
    where = np.empty(len(order), np.int64)
    where[order] = np.arange(len(order))
    _copy(builder, graph, where, order, items, np.array([key[one] for one in frozen.passes], np.int64))
    own, last = where[graph.num_tasks :], len(frozen.passes) - 1
    stream = items.rank * len(QUEUES)  # their compute queues
    builder.occupy(own, stream)
    behind = np.flatnonzero(items.layer > 0)
    builder.depend(own[behind], own[behind - 1])
    for i in np.flatnonzero((items.layer == last) & (items.rank > 0)).tolist():
        send = frozen.sends[int(items.rank[i])]
        queue = builder.stream(int(items.rank[i]), "link_forward")
        (sent,) = builder.extend(KIND["send"], key[send], stream=[queue], microbatch=int(items.microbatch[i]))
        builder.depend([sent], [own[i]])
    built = msgspec.structs.replace(builder.build(), keys=tuple(f"{p.name} #{i}" for i, p in enumerate(programs)))
    static = tuple(one | _held(frozen, lowered, rank % pp == 0) for rank, one in enumerate(lowered.static_bytes))
    return msgspec.structs.replace(lowered, graph=built, programs=programs, static_bytes=static, filled=frozen.stages)


def _copy(
    builder: GraphBuilder,
    graph: TaskGraph,
    where: NDArray[np.int64],
    order: NDArray[np.int64],
    items: FrozenItems,
    keys: NDArray[np.int64],
) -> None:
    """Put the tasks of a graph, and those of the items, in their order, with all that is known of the graph's."""
    n, none = graph.num_tasks, np.full(len(items.rank), -1)
    named = {"stage": none, "chunk": none, "step": none, "microbatch": items.microbatch, "layer": items.layer}
    builder.extend(
        np.concatenate([graph.kind, np.full(len(items.rank), KIND["F"])])[order],
        np.concatenate([graph.cost_key, keys[items.layer]])[order],
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
    return out | ({"frozen results": 2 * count * frozen.result_bytes} if first else {})
