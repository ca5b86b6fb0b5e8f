"""Frozen layers assigned to the waits of a pipeline's ranks: which microbatches each rank takes, and where each pass
goes.

Microbatches go to the ranks that compute least (``assign/``: the costliest bin is made small), and on a rank each pass
through a layer goes into the first wait behind the pass before it that has room for it, what no wait has room for
behind all that the rank computes (DiffusionPipe, Tian et al., MLSys 2024, packs its bubbles greedily too).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.assign import Problem, solve
from meshwright.cost import Costs
from meshwright.graph import QUEUE
from meshwright.lower.filling import FrozenItems, FrozenLayers, filled, frozen_layers
from meshwright.plan import Plan
from meshwright.simulate.clock import times
from meshwright.simulate.price import Pricer
from meshwright.simulate.simulated import Simulated
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

Waits = list[tuple[float, float]]


def with_frozen(run: Simulated, plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs) -> Simulated:
    """The step of a plan with ``fill``, of whose trained layers `run` is the step."""
    frozen = frozen_layers(plan, model, cluster, train, run.lowered)
    pricer = Pricer(costs)
    items = placed(run, frozen, pricer.all(frozen.passes).durations, plan.num_microbatches(train.global_batch))
    lowered = filled(run.lowered, frozen, items)
    priced = pricer.all(lowered.programs)
    return Simulated.of(lowered, priced, times(lowered, priced, costs), costs, run.schedule_params)


def placed(run: Simulated, frozen: FrozenLayers, durations: NDArray[np.float64], count: int) -> FrozenItems:
    """Where the passes of `count` microbatches through layers of these durations, seconds, go."""
    pp = run.lowered.plan.layout.pp
    computed = [_computed(run, rank) for rank in range(pp)]
    start = np.array([sum(end - begin for begin, end in one) for one in computed])
    each = np.full(count, float(durations.sum()))
    problem = Problem(sizes=np.ones(count, np.int64), capacity=count, costs=each, num_bins=pp, start=start)
    bin_of = solve("heaviest-first", problem).bin_of
    rows: list[tuple[int, int, int, float]] = []
    for rank in range(pp):
        mine = np.flatnonzero(bin_of == rank).tolist()
        passes = [(microbatch, layer) for microbatch in mine for layer in range(len(durations))]
        at = fitted(waits(computed[rank], run.step_time_s), [durations[layer] for _, layer in passes])
        rows += [(rank, *one, place) for one, place in zip(passes, at)]
    columns = list(zip(*rows)) or [(), (), (), ()]
    rank, microbatch, layer = (np.array(column, np.int64) for column in columns[:3])
    return FrozenItems(
        rank=rank, microbatch=microbatch, layer=layer, at=np.array(columns[3], np.float64), when=run.start_s
    )


def _computed(run: Simulated, rank: int) -> Waits:
    """Beginning and end of all that a pipeline rank computes, in order."""
    graph = run.lowered.graph
    streams = np.flatnonzero((graph.streams.rank == rank) & (graph.streams.queue == QUEUE["compute"]))
    task = np.repeat(np.arange(graph.num_tasks), np.diff(graph.member_ptr))[np.isin(graph.member, streams)]
    return sorted(zip(run.start_s[task].tolist(), run.end_s[task].tolist()))


def waits(computed: Waits, until: float) -> Waits:
    """Beginning and end of what lies between what a rank computes, up to a time."""
    ends = [0.0, *(end for _, end in computed)]
    begins = [*(begin for begin, _ in computed), until]
    return [(end, begin) for end, begin in zip(ends, begins) if begin > end]


def fitted(free: Waits, durations: list[float]) -> list[float]:
    """Where each pass begins: in the first wait behind the one before it that has room, else behind all waits."""
    out, index = [], 0
    now = free[0][0] if free else 0.0
    for duration in durations:
        while index < len(free) and max(now, free[index][0]) + duration > free[index][1]:
            index += 1
        begin = max(now, free[index][0]) if index < len(free) else max(now, free[-1][1] if free else 0.0)
        out.append(begin)
        now = begin + duration
    return out
