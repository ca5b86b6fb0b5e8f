"""Re-planning: the plan for the devices that are left when some are lost, and the shares of its replicas.

The global batch stays, and so do microbatches: fewer replicas take more of them each, not all as many. Where too few
devices are left for the pipeline, its layers move to fewer stages (ElasWave, 2510.00606). Of all such plans the one
that is predicted to be the fastest is taken. A step of uneven replicas is as long as that of the one that does most.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright.answer.rank_memory import rank_memory
from meshwright.cost import Costs, standard_on
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan, check
from meshwright.simulate.step import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import Model
from meshwright.spec.workload import Train

#: Plans that are priced for a number of devices: those that leave the fewest of them out.
MOST_PRICED = 6


class Replanned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for fewer devices: ``counts`` are the microbatches of each replica where they are not as many on all, and
    ``params`` those of its schedule."""

    plan: Plan
    counts: tuple[int, ...]
    step_time_s: float
    fits: bool
    params: dict


def replanned(
    model: Model, cluster: Cluster, train: Train, plan: Plan, devices: int, *, costs: Costs | None = None
) -> Replanned | None:
    """The fastest plan like `plan` on at most so many of the cluster's devices, those that fit first; None where there
    is none. `plan` has one pool."""
    found, priced = [], costs or standard_on(cluster)
    like = sorted(shrunk(plan, train, devices), key=lambda one: -one[0].layout.num_ranks)
    for one, counts in like:
        share = max(counts, default=0) or train.global_batch // (one.layout.dp * one.pipeline.microbatch)
        alike = msgspec.structs.replace(train, global_batch=share * one.layout.dp * one.pipeline.microbatch)
        smaller = with_devices(cluster, one.layout.num_ranks)
        if smaller is None or check(one, model, smaller, alike):
            continue
        if len(found) == MOST_PRICED:
            break
        try:
            run = simulate(one, model, smaller, alike, priced)
        except MeshwrightError:  # it cannot be priced there
            continue
        even = counts if len(set(counts)) > 1 else ()
        fits = all(rank.headroom_bytes >= 0 for rank in rank_memory(run, priced))
        found.append(
            Replanned(plan=one, counts=even, step_time_s=run.step_time_s, fits=fits, params=run.schedule_params)
        )
    return min(found, key=lambda r: (not r.fits, r.step_time_s), default=None)


def shrunk(plan: Plan, train: Train, devices: int) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """Yield plans with fewer replicas, or fewer stages, on at most so many devices, each with the microbatches of its
    replicas."""
    layout, microbatches = plan.layout, train.global_batch // plan.pipeline.microbatch
    for pp in range(layout.pp, 0, -1):
        unit = layout.tp * layout.cp * pp
        most = min(devices // unit, microbatches)
        if not most:
            continue
        even = max(n for n in range(1, most + 1) if microbatches % n == 0)
        for dp in sorted({most, even}, reverse=True):
            if dp != even and layout.shards_gradients:
                continue  # replicas exchange after every microbatch, and have to have as many
            whole, rest = divmod(microbatches, dp)
            counts = tuple(whole + (i < rest) for i in range(dp))
            stages = layout.stages if pp == layout.pp else ()
            yield (
                msgspec.structs.replace(plan, layout=msgspec.structs.replace(layout, pp=pp, dp=dp, stages=stages)),
                counts,
            )


def with_devices(cluster: Cluster, devices: int) -> Cluster | None:
    """The cluster with its first `devices` alone, as evenly in its levels as they go; None where it is of several
    islands, whose devices differ."""
    if len(cluster.islands) > 1 or devices > cluster.num_devices:
        return None
    island, left, levels = cluster.islands[0], devices, []
    for level in island.levels[:-1]:
        inside = level.arity if left % level.arity == 0 else left if left < level.arity else 1
        levels.append(msgspec.structs.replace(level, arity=inside))
        left //= inside
    levels.append(msgspec.structs.replace(island.levels[-1], arity=left))
    smaller = msgspec.structs.replace(island, levels=tuple(levels))
    share = devices / cluster.num_devices
    return msgspec.structs.replace(
        cluster,
        name=f"{devices} of {cluster.name}",
        islands=(smaller,),
        price_usd_hour=None if cluster.price_usd_hour is None else cluster.price_usd_hour * share,
        mtbf_hours=None if cluster.mtbf_hours is None else cluster.mtbf_hours / share,
    )
