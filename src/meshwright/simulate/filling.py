"""Frozen layers assigned to a pipeline's ranks and their waits: which samples each takes, and where each pass goes.

Chunks of microbatches go to the ranks that compute least (``assign/``: the costliest bin is made small), and on a rank
each pass through a layer goes into the first wait behind the pass before it that has room for it, what no wait has room
for behind all that the rank computes. With ``filling=parts`` as many rows of a pass as a wait has room for go into it,
and the others into the next: long layers fill short waits (DiffusionPipe, Tian et al., 2024, arXiv 2405.01248, packs
its bubbles greedily, and partial batches into them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.assign import Problem, solve
from meshwright.cost import Costs
from meshwright.graph import KIND, QUEUE, TaskGraph
from meshwright.lower.filling import (
    Filled,
    FrozenItems,
    FrozenLayers,
    FrozenOrder,
    FrozenPass,
    filled,
    forwards,
    frozen_layers,
)
from meshwright.plan import Plan
from meshwright.plan.facets.pipeline import BEFORE, PARTS
from meshwright.plan.filling import num_frozen
from meshwright.simulate.clock import times
from meshwright.simulate.price import Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.parts import part_of
from meshwright.spec.workload import Train

Waits = list[tuple[float, float]]
#: Where what is run before a step stands on the scale of its times.
AHEAD_S = -1.0


class Packed(NamedTuple):
    """A pass of rows of a chunk through a layer, at a time."""

    layer: int
    first: int
    rows: int
    at: float


def with_frozen(
    run: Simulated,
    plan: Plan,
    model: Model,
    cluster: Cluster,
    train: Train,
    costs: Costs,
    pricer: Pricer | None = None,
) -> Simulated:
    """The step of a plan with frozen layers, of whose trained layers `run` is the step."""
    frozen = frozen_layers(plan, model, cluster, train, run.lowered)
    pricer = pricer or Pricer(costs)
    durations = {rows: pricer.all(passes).durations for rows, passes in frozen.passes.items()}
    items = placed(run, frozen, durations, plan.num_microbatches(train.global_batch))
    lowered = filled(run.lowered, frozen, items)
    priced = pricer.all(lowered.programs)
    found = Simulated.of(lowered, priced, times(lowered, priced, costs), costs, run.schedule_params)
    return msgspec.structs.replace(found, filled=_filled(run, frozen, durations, items))


def least_seconds(plan: Plan, model: Model, cluster: Cluster, train: Train, pricer: Pricer) -> float:
    """Seconds of a rank in which the frozen layers are passed by its even share of a step's samples, as many together
    as takes the least: what no order of passes is below."""
    part, mb = part_of(model, 0, num_frozen(plan, model)), plan.pipeline.microbatch
    each = []
    for rows in (n for n in range(1, mb + 1) if mb % n == 0):
        _, passes = forwards(plan, part, cluster, train, rows)
        each.append(float(pricer.all(passes).durations.sum()) / rows)
    return min(each) * train.global_batch / (plan.layout.dp * plan.layout.pp)


def placed(
    run: Simulated, frozen: FrozenLayers, durations: Mapping[int, NDArray[np.float64]], count: int
) -> FrozenItems:
    """Where the passes of `count` microbatches go; `durations`, seconds, are those of the layers by rows that pass."""
    pp, chunk = run.lowered.plan.layout.pp, frozen.chunk
    computed = [_computed(run, rank) for rank in range(pp)]
    start = np.array([sum(end - begin for begin, end in one) for one in computed])
    if frozen.way == BEFORE:  # nothing else is run meanwhile
        start = np.zeros(pp)
    parts = frozen.rows // chunk
    each = np.full(count * parts, float(durations[chunk].sum()))
    problem = Problem(sizes=np.ones(len(each), np.int64), capacity=len(each), costs=each, num_bins=pp, start=start)
    bin_of = solve("heaviest-first", problem).bin_of
    sizes = sorted((n for n in durations if chunk % n == 0), reverse=True) if frozen.way == PARTS else [chunk]
    rows: list[tuple[int, int, int, int, int, bool, float]] = []
    for rank in range(pp):
        mine = np.flatnonzero(bin_of == rank).tolist()
        free = [] if frozen.way == BEFORE else waits(computed[rank], run.step_time_s)
        found = packed(
            free, durations, sizes, [chunk] * len(mine), behind_s=AHEAD_S if frozen.way == BEFORE else run.step_time_s
        )
        for number, passes in zip(mine, found):
            microbatch, part = divmod(number, parts)
            for one in passes:
                whole = one is passes[-1]
                at = AHEAD_S if frozen.way == BEFORE else one.at
                rows.append((rank, microbatch, one.layer, part * chunk + one.first, one.rows, whole, at))
    columns = list(zip(*rows)) or [()] * 7
    numbers = (np.array(column, np.int64) for column in columns[:5])
    names = ("rank", "microbatch", "layer", "first", "rows")
    return FrozenItems(
        **dict(zip(names, numbers)),
        whole=np.array(columns[5], bool),
        at=np.array(columns[6], np.float64),
        when=run.start_s,
    )


def _filled(
    run: Simulated, frozen: FrozenLayers, durations: Mapping[int, NDArray[np.float64]], items: FrozenItems
) -> Filled:
    """How full the waits are, and what each rank runs."""
    pp, until = run.lowered.plan.layout.pp, run.step_time_s
    took = np.array([durations[n][layer] for n, layer in zip(items.rows.tolist(), items.layer.tolist())])
    waiting = [waits(_computed(run, rank), until) for rank in range(pp)]
    inside = took[(items.at >= 0) & (items.at + took <= until * (1 + 1e-9))].sum() if len(took) else 0.0
    return Filled(
        layers=frozen.num_layers,
        way=frozen.way,
        trained_s=until,
        waits_s=sum(end - begin for one in waiting for begin, end in one),
        frozen_s=float(took.sum()),
        inside_s=float(inside),
        order=FrozenOrder(frozen.chunk, tuple(_order(run, items, rank) for rank in range(pp))),
    )


def _order(run: Simulated, items: FrozenItems, rank: int) -> tuple[FrozenPass, ...]:
    """The frozen passes of a rank in order, each behind so many of its schedule's actions."""
    graph = run.lowered.graph
    stage, kind = graph.attribute("stage"), graph.kind
    task = _tasks(graph, rank)
    passes = task[np.isin(kind[task], [KIND[name] for name in ("F", "B", "W", "BW")]) & (stage[task] >= 0)]
    begun: dict[tuple[int, int, int], float] = {}  # an action may be a task for each of its layers
    for one in passes.tolist():
        action = int(kind[one]), int(stage[one]), int(graph.attribute("microbatch")[one])
        begun[action] = min(begun.get(action, np.inf), float(run.start_s[one]))
    starts = np.sort(np.array(list(begun.values())))
    mine = np.flatnonzero(items.rank == rank)
    behind = np.searchsorted(starts, items.at[mine], side="left")
    columns = (behind, *(column[mine] for column in (items.microbatch, items.layer, items.first, items.rows)))
    return tuple(FrozenPass(*one) for one in zip(*(column.tolist() for column in columns)))


def _computed(run: Simulated, rank: int) -> Waits:
    """Beginning and end of all that a pipeline rank computes, in order."""
    task = _tasks(run.lowered.graph, rank)
    return sorted(zip(run.start_s[task].tolist(), run.end_s[task].tolist()))


def _tasks(graph: TaskGraph, rank: int) -> NDArray[np.int64]:
    """The tasks on a pipeline rank's compute queue."""
    streams = np.flatnonzero((graph.streams.rank == rank) & (graph.streams.queue == QUEUE["compute"]))
    return np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))[np.isin(graph.member, streams)]


def waits(computed: Waits, until: float) -> Waits:
    """Beginning and end of what lies between what a rank computes, up to a time."""
    ends = [0.0, *(end for _, end in computed)]
    begins = [*(begin for begin, _ in computed), until]
    return [(end, begin) for end, begin in zip(ends, begins) if begin > end]


def packed(
    free: Waits,
    durations: Mapping[int, Sequence[float]],
    sizes: Sequence[int],
    chunks: Sequence[int],
    *,
    behind_s: float | None = None,
) -> list[list[Packed]]:
    """The passes of some chunks of rows, chunk by chunk and layer by layer. Each goes into the first wait behind the
    pass before it that has room for it, or for as many of its rows as one of the `sizes`, the largest first; what finds
    none goes to `behind_s`, unless said the last wait's end. `durations` are seconds of the layers by rows."""
    out, index = [], 0
    last = behind_s if behind_s is not None else free[-1][1] if free else 0.0
    now = free[0][0] if free else last
    for chunk in chunks:
        passes: list[Packed] = []
        for layer in range(len(durations[sizes[0]])):
            done = 0
            while done < chunk:
                rows, begin = 0, last
                while index < len(free):
                    begin = max(now, free[index][0])
                    fits = [n for n in sizes if n <= chunk - done and begin + durations[n][layer] <= free[index][1]]
                    if fits:
                        rows = fits[0]
                        break
                    index += 1
                if not rows:
                    rows, begin = next(n for n in sizes if n <= chunk - done), max(now, last)
                passes.append(Packed(layer, done, rows, begin))
                now, done = begin + durations[rows][layer], done + rows
        out.append(passes)
    return out
