"""Nothing fits: the plans that come closest, and what would make them fit."""

from __future__ import annotations

import numpy as np

from meshwright.search.bounds import Scope, memory_bytes
from meshwright.search.found import NearMiss
from meshwright.search.regions import Regions
from meshwright.search.space import inners, pipelines, states
from meshwright.search.walk import Tried, Walk

#: Cores whose plans are looked at, those with the least state first, and plans shown.
CORES, SHOWN = 64, 5


def near_misses(walk: Walk) -> tuple[NearMiss, ...]:
    """The evaluated plans that lack least, after those with the lowest bounds on memory have been evaluated."""
    regions = Regions(walk.evaluator)
    found = sorted(
        ((regions.least_state_bytes(s.core, s.states, s.inners[0]) / s.core.pp, s) for s in _scopes(walk)),
        key=lambda pair: pair[0],
    )
    tightest: list[tuple[float, tuple]] = []
    for _, scope in found[:CORES]:
        usual = scope.inners[0].order
        scope = scope._replace(inners=[i for i in scope.inners if i.order == usual])
        need = memory_bytes(regions, scope, regions.costs(scope.core, scope.inners))
        need[~scope.legal()] = np.inf
        a, b, c = np.unravel_index(int(need.argmin()), need.shape)
        point = scope.core, scope.inners[a], scope.pipelines[b], scope.states[c]
        tightest.append((float(need.min()), point))
    for _, point in sorted(tightest, key=lambda pair: pair[0])[:SHOWN]:
        walk.evaluate(*point)
    closest = sorted(walk.tried.values(), key=lambda t: (-t.headroom_bytes, t.step_time_s, t.plan.text()))
    return tuple(_miss(t, walk) for t in closest[:SHOWN])


def _scopes(walk: Walk) -> list[Scope]:
    asked = (walk.model, walk.cluster, walk.train)
    scopes = (
        Scope(
            core,
            inners(walk.space, core, *asked),
            pipelines(walk.space, core, walk.model, walk.train),
            states(walk.space, core, walk.cluster, walk.train),
        )
        for core in walk.cores
    )
    return [s for s in scopes if s.size()]


def _miss(tried: Tried, walk: Walk) -> NearMiss:
    """Devices with room for the plan would do, or as many more as share what is too much."""
    capacity = walk.capacity_bytes
    need = capacity - tried.headroom_bytes
    devices = int(-(-need // capacity)) * walk.cluster.num_devices
    return NearMiss(
        plan=tried.plan,
        step_time_s=tried.step_time_s,
        lacks_bytes=-tried.headroom_bytes,
        remedy=f"devices of {need / 2**30:.0f} GiB instead of {capacity / 2**30:.0f} GiB, or about {devices} devices",
    )
