"""Devices for pools that leave open how many they have: every number of replicas of each that fills the cluster, priced
by the simulator; the fastest that fits is taken (DistTrain, Zhang et al. 2408.04275, solves a convex program over a
model of its pipeline for this; here the step itself is timed).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec

from meshwright.answer.rank_memory import rank_memory
from meshwright.cost import Costs
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan, check
from meshwright.plan.facet import divisors
from meshwright.plan.pool import models
from meshwright.quantity import seconds as shown
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: Allotments that are timed at most: those whose devices have the most equal numbers of parameters to compute with.
MOST = 64


class Allotment(msgspec.Struct, frozen=True, kw_only=True):
    """How devices were given to pools: replicas of each pool that was open, of so many ``legal`` ways, of which so many
    were ``tried``; ``step_s`` of the one that was taken, and of the slowest."""

    replicas: dict[str, int]
    legal: int
    tried: int
    step_s: float
    slowest_s: float

    @property
    def text(self) -> str:
        """The choice in words."""
        given = " and ".join(f"dp{count} to {name}" for name, count in self.replicas.items())
        return (
            f"devices were given to pools so that the step is shortest: {given}, of {self.tried} ways that were timed "
            f"({self.legal} are legal); the slowest takes {shown(self.slowest_s)}"
        )


def open_pools(plan: Plan) -> tuple[int, ...]:
    """Numbers of the pools that say neither their devices nor how many replicas they have."""
    return tuple(i for i, pool in enumerate(plan.several) if not pool.devices and not pool.plan.layout.dp)


def allotted(plan: Plan, model: Model, cluster: Cluster, train: Train, costs: Costs) -> tuple[Plan, Allotment | None]:
    """The plan with devices for all its pools, and how they were given out; the plan itself where one pool at most is
    open, which takes what the others leave.

    Raises:
        MeshwrightError: P041 where no numbers of replicas fill the cluster; what is wrong with the pools where none of
            those that do is legal.
    """
    found = open_pools(plan)
    if len(found) < 2:
        return plan, None
    ways = list(_filled(plan, found, cluster, train))
    legal = [one for one in ways if not check(one, model, cluster, train)]
    if ways and not legal:  # something else is wrong with the pools
        raise MeshwrightError(check(ways[0], model, cluster, train))
    if not legal:
        names = " and ".join(plan.several[i].name for i in found)
        raise MeshwrightError.one(
            "P041",
            f"no numbers of replicas of {names} fill {cluster.name} and divide the batch",
            place=f"plan.{plan.several[found[0]].name}.on",
            help="say dp in all pools but one, another batch, or other tp, pp and mb",
        )
    legal.sort(key=lambda one: _uneven(one, model))
    best, times = None, []
    for one in legal[:MOST]:
        run = simulate(one, model, cluster, train, costs)
        lacks = max(0.0, -min(rank.headroom_bytes for rank in rank_memory(run, costs)))
        times.append(run.step_time_s)
        if best is None or (lacks, run.step_time_s) < best[:2]:
            best = (lacks, run.step_time_s, one)
    _, step_s, taken = best
    return taken, Allotment(
        replicas={taken.several[i].name: taken.several[i].plan.layout.dp for i in found},
        legal=len(legal),
        tried=len(times),
        step_s=step_s,
        slowest_s=max(times, default=inf),
    )


def _filled(plan: Plan, found: tuple[int, ...], cluster: Cluster, train: Train) -> Iterator[Plan]:
    """Plans whose open pools have replicas that use all devices and divide the batch."""
    taken = sum(pool.plan.on(1).layout.num_ranks for i, pool in enumerate(plan.several) if i not in found)
    sizes = [_size(plan, i) for i in found]
    counts = [
        [
            n
            for n in divisors(train.global_batch)
            if train.global_batch % (n * plan.several[i].plan.pipeline.microbatch) == 0
        ]
        for i in found
    ]

    def ways(at: int, left: int) -> Iterator[tuple[int, ...]]:
        if at == len(found):
            if left == 0:
                yield ()
            return
        for n in counts[at]:
            if n * sizes[at] <= left:
                yield from ((n, *rest) for rest in ways(at + 1, left - n * sizes[at]))

    for given in ways(0, cluster.num_devices - taken):
        pools = list(plan.several)
        for i, n in zip(found, given):
            own = pools[i].plan
            own = msgspec.structs.replace(own, layout=msgspec.structs.replace(own.layout, dp=n))
            pools[i] = msgspec.structs.replace(pools[i], plan=own)
        yield msgspec.structs.replace(plan, several=tuple(pools)).on(cluster.num_devices)


def _size(plan: Plan, pool: int) -> int:
    """Ranks of one replica of a pool."""
    layout = plan.several[pool].plan.layout
    return layout.tp * layout.pp * layout.cp


def _uneven(plan: Plan, model: Model) -> float:
    """The most parameters that a device of some pool computes with."""
    held = zip(plan.several, models(plan.several, model))
    return max(part.num_params / pool.plan.layout.num_ranks for pool, part in held)
