"""A warm start: plans that were good elsewhere are evaluated first, so that bounds have something to be worse than.

What is proven stays proven: a plan that is evaluated early is one of the space like any other, and one that is not in
the space is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from meshwright.plan import Plan
from meshwright.plan.facets.overlap import AS_DECIDED
from meshwright.search.legal import legal
from meshwright.search.space import Core, Inner, Piped, State, inners, pipelines, point, states
from meshwright.search.walk import Walk


def warm(walk: Walk, plans: Iterable[Plan]) -> None:
    """Evaluate those of `plans` that are in the walk's space."""
    for plan in plans:
        point = point_of(plan, walk)
        if point is not None:
            walk.evaluate(*point)


def point_of(plan: Plan, walk: Walk) -> tuple[Core, Inner, Piped, State] | None:
    """The point of the walk's space at which a plan with its ``dp`` filled in lies; None where it has none."""
    core, inner, piped, state = point(plan)
    if core not in walk.cores:
        return None
    asked = walk.model, walk.cluster, walk.train
    among = states(walk.space, core, walk.cluster, walk.train)
    mine = inners(walk.space, core, *asked)
    if inner not in mine:
        inner = inner._replace(overlap=(*inner.overlap, AS_DECIDED))
    if (
        inner not in mine
        or piped not in pipelines(walk.space, core, walk.trained, walk.train)
        or state not in among
        or not legal(core, inner, piped, state, among, walk.trained.num_layers)
    ):
        return None
    return core, inner, piped, state


def grown(plan: Plan, num_devices: int) -> tuple[Plan, ...]:
    """The plan on another number of devices, which data parallelism takes: sharded over as many ranks as before, and
    over all of them. Empty where the other axes do not divide the devices."""
    layout = plan.layout
    dp, rest = divmod(num_devices, layout.tp * layout.pp * layout.cp)
    if rest:
        return ()
    shards = dict.fromkeys((layout.shard, 0))
    layouts = [msgspec.structs.replace(layout, dp=dp, shares=(), shard=shard) for shard in shards]
    return tuple(msgspec.structs.replace(plan, layout=each) for each in layouts)
