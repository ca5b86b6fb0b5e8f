"""Nothing fits: the plans that come closest, and what would make them fit."""

from __future__ import annotations

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.plan import check
from meshwright.plan.text import over
from meshwright.quantity import seconds
from meshwright.search.bounds import memory_bytes
from meshwright.search.found import NearMiss
from meshwright.search.walk import UNRUNNABLE, Tried, Walk

#: Cores whose plans are looked at, those with the least state first; plans tried at most, and plans shown.
CORES, TRIED, SHOWN = 64, 24, 5
#: Words that move state off the devices, each more than the one before it; drives are the last.
LADDER = (
    "offload=optimizer",
    "offload=optimizer+activations",
    "offload=params+grads+optimizer+activations",
    "offload=params:nvme+grads:nvme+optimizer:nvme+activations",
)


def near_misses(walk: Walk) -> tuple[NearMiss, ...]:
    """The evaluated plans that lack least, after those with the lowest bounds on memory have been evaluated."""
    regions = walk.regions
    scopes = [scope for core in walk.cores for scope in walk.scopes(core)]
    found = sorted(
        ((regions.exchanges.least_state_bytes(s.core, s.states, s.inners) / s.core.pp, s) for s in scopes),
        key=lambda pair: pair[0],
    )
    tightest: list[tuple[float, tuple]] = []
    for _, scope in found[:CORES]:
        scope = scope._replace(inners=scope.inners.take(scope.inners.order == scope.inners.order[0]))
        need = memory_bytes(regions, scope, regions.costs(scope.core, scope.inners))
        need[~scope.legal()] = np.inf
        for name in dict.fromkeys(piped.schedule for piped in scope.pipelines):  # bounds are not as close for all
            mine = [b for b, piped in enumerate(scope.pipelines) if piped.schedule == name]
            a, b, c = np.unravel_index(int(need[:, mine].argmin()), (need.shape[0], len(mine), need.shape[2]))
            point = scope.core, scope.inners[a], scope.pipelines[mine[b]], scope.states[c]
            tightest.append((float(need[a, mine[b], c]), point))
    lacks: list[float] = []
    tightest = [found for found in tightest if np.isfinite(found[0])]
    for need_bytes, point in sorted(tightest, key=lambda pair: pair[0])[:TRIED]:
        if len(lacks) >= SHOWN and sorted(lacks)[SHOWN - 1] < need_bytes - walk.capacity_bytes:
            break  # no plan left is closer
        answer = walk.evaluate(*point)
        if answer != UNRUNNABLE:
            lacks.append(walk.wanted.room_bytes - answer.headroom_bytes)
    closest = sorted(walk.tried.values(), key=lambda t: (-t.headroom_bytes, t.step_time_s, t.plan.text()))
    return tuple(_miss(t, walk) for t in closest[:SHOWN])


def _miss(tried: Tried, walk: Walk) -> NearMiss:
    """Return the near miss of a plan: it would fit on devices with room for it, or on so many more that share the
    excess."""
    room = walk.wanted.room_bytes
    capacity = walk.capacity_bytes + room
    need = capacity - tried.headroom_bytes + room
    devices = int(-(-need // capacity)) * walk.cluster.num_devices
    remedy = f"devices of {need / 2**30:.0f} GiB instead of {capacity / 2**30:.0f} GiB, or about {devices} devices"
    return NearMiss(
        plan=tried.plan,
        step_time_s=tried.step_time_s,
        lacks_bytes=room - tried.headroom_bytes,
        remedy="; ".join(filter(None, (remedy, _moved(tried, walk)))),
    )


def _moved(tried: Tried, walk: Walk) -> str:
    """The least that has to lie off the devices for a plan to fit, with the step time that it then has; "" where that
    is not legal, does not help, or plans of some engine are asked for."""
    if tried.plan.several or tried.plan.offload.any or walk.wanted.runnable is not None:
        return ""
    for words in LADDER:
        plan = over(tried.plan, words)
        if check(plan, walk.model, walk.cluster, walk.train):
            continue
        try:
            answer = walk.evaluator(plan)
        except MeshwrightError:  # a window of layers is larger than its tier
            continue
        if answer.headroom_bytes >= walk.wanted.room_bytes:
            return f"or {words}: fits, {seconds(answer.step_time_s)} a step"
    return ""
