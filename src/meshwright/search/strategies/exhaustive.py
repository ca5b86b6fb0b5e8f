"""All of the space, with bounds: what is not evaluated has a bound above the best, so the best is proven.

Branch and bound (Land and Doig, 1960) in three rounds over ever smaller regions: a core by the kernels its layers
cannot do without; a core's plans all at once by paths, exchanges and memory (``search/bounds.py``); what is left plan
by plan, the lowest bound first, until the next bound is above the last plan worth keeping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress

import numpy as np

from meshwright.search.bounds import (
    ROUNDING,
    CoreScope,
    compute_seconds,
    even_share,
    memory_bytes,
    step_seconds,
    work_seconds,
)
from meshwright.search.columns import CoreColumns
from meshwright.search.regions import Regions
from meshwright.search.space import Core
from meshwright.search.walk import Walk

#: Reasons for rejection, as they are counted.
KERNELS = "slower even with no bubble and nothing exchanged"
PATHS = "slower: bound of compute, pipeline and exposed communication"
SAME = "the same as a plan with the axes in another order"
LAYERS = "slower: kernels and communication that layers wait for, and the bubble"
CROWDED = "does not fit: state alone"
TIMED = "slower: its own pipeline and exposed communication"
STATE = "does not fit: bound of state and activations"
#: Cores looked at first, and plans tried in each of them.
SCOUTS, DIVES = 12, 4


class Region:
    """A core whose plans have been bounded: ``bound_s`` [A, B, C] is infinite where the plan is rejected, ``along_s``
    [A, B, C] the bounds that go along the pipeline and ``paths_s`` [A, B] the part of those that is the pipeline."""

    def __init__(
        self, scope: CoreScope, costs: CoreColumns, bound_s: np.ndarray, along_s: np.ndarray, paths_s: np.ndarray
    ):
        self.scope, self.costs, self.bound_s, self.along_s, self.paths_s = scope, costs, bound_s, along_s, paths_s
        self._exact: dict[tuple[int, int], float] = {}

    def part(self, flat: int) -> tuple:
        """The point of one plan."""
        a, b, c = np.unravel_index(flat, self.bound_s.shape)
        scope = self.scope
        return scope.core, scope.inners[a], scope.pipelines[b], scope.states[c]

    def tightened_s(self, regions: Regions, flat: int) -> float:
        """The bound of one plan with its pipeline timed under its own times, once for all its state parts."""
        a, b, _ = np.unravel_index(flat, self.bound_s.shape)
        found = self._exact.get((a, b))
        if found is None:
            found = regions.makespan(self.scope.core, self.scope.inners[a], self.scope.pipelines[b], self.costs, a)
            found -= self.paths_s[a, b]
            self._exact[a, b] = found
        return max(float(self.bound_s.flat[flat]), float(self.along_s.flat[flat]) + found)


def run(walk: Walk) -> bool:
    """Walk the whole space; True when the best is proven, which it is unless the walk was stopped."""
    regions = walk.regions
    ordered = sorted(scopes(walk, regions), key=lambda found: promise(walk, *found))
    _scout(walk, regions, [scope for _, scope in ordered[:SCOUTS]])
    shortened = _shortened(walk, regions, ordered)
    _scout(walk, regions, shortened[: 8 * SCOUTS])
    found: list[Region] = []
    for scope in shortened:
        region = bounded_region(walk, regions, scope)
        if region is not None:
            found.append(region)
            lowest = int(region.bound_s.argmin())
            if region.tightened_s(regions, lowest) * (1 - ROUNDING) <= walk.worth_s:
                walk.evaluate(*region.part(lowest))
        if walk.stopped:
            return False
    return _leaves(walk, regions, found)


def _shortened(walk: Walk, regions: Regions, ordered: Sequence[tuple[float, CoreScope]]) -> list[CoreScope]:
    """Cores without the inner parts whose layers alone, spread over the ranks with no bubble, are too slow: no schedule
    has to be built for those. The most promising first, now that what layers wait for is known."""
    found = []
    for ideal, scope in ordered:
        worth = walk.worth_s
        if ideal * (1 - ROUNDING) > worth:
            walk.reject(KERNELS, scope.size())
            continue
        rough, _, which = regions.glances.costs(scope.core, scope.inners)
        frozen_s = walk.evaluator.frozen_s(scope.core, scope.inners)
        share = even_share(regions, scope.core, rough) + frozen_s
        left = scope._replace(inners=scope.inners.take((share * (1 - ROUNDING) <= worth)[which]))
        walk.reject(LAYERS, scope.size() - left.size())
        if left.inners:
            found.append((with_bubble(walk, scope.core, float(share.min())), left))
    return [scope for _, scope in sorted(found, key=lambda pair: pair[0])]


def scopes(walk: Walk, regions: Regions) -> Iterator[tuple[float, CoreScope]]:
    """Every core's region with the time its kernels need; those whose state fits no device are rejected here."""
    for core in walk.cores:
        for scope in walk.lists(core):
            if regions.exchanges.crowded(core, scope.states, scope.inners):
                walk.reject(CROWDED, scope.size())
                continue
            yield regions.glances.ideal_seconds(core, scope.inners), scope


def promise(walk: Walk, ideal: float, scope: CoreScope) -> float:
    """A guess at the step time, for the order in which cores are looked at: layers that reach over nodes last. It
    decides nothing else."""
    core = scope.core
    far = core.tp * core.cp > walk.cluster.islands[0].domain_size
    return with_bubble(walk, core, ideal) * (1.2 if far else 1.0)


def with_bubble(walk: Walk, core: Core, seconds: float) -> float:
    """The work of a pipeline's rank with half of 1F1B's bubble."""
    count = walk.train.global_batch // (core.dp * core.mb)
    return seconds * (1 + (core.pp - 1) / (2 * count))


def _scout(walk: Walk, regions: Regions, scopes: Sequence[CoreScope]) -> None:
    """Good plans early, so that bounds have something to be worse than: axes in the usual order, a few plans of each
    core, the lowest bounds first. Nothing is rejected here."""
    later: list[tuple[float, int, Region, int]] = []

    def dive(region: Region, leaf: int) -> None:
        bound = region.bound_s.flat[leaf]
        if np.isfinite(bound) and bound <= walk.worth_s and region.tightened_s(regions, leaf) <= walk.worth_s:
            walk.evaluate(*region.part(leaf))

    for scope in scopes:
        scope = scope._replace(inners=scope.inners.take(scope.inners.order == scope.inners.order[0]))
        scope = _glanced(walk, regions, scope)
        region = _bounded(walk, regions, scope, reject=False) if scope.size() else None
        leaves = np.argsort(region.bound_s, axis=None, kind="stable")[:DIVES].tolist() if region else ()
        for leaf in leaves[:1]:  # what comes next can be worse than this
            dive(region, leaf)
        later += [(float(region.bound_s.flat[leaf]), len(later), region, leaf) for leaf in leaves[1:]]
    for _, _, region, leaf in sorted(later, key=lambda found: found[:2]):
        dive(region, leaf)


def bounded_region(walk: Walk, regions: Regions, scope: CoreScope) -> Region | None:
    """Return a core's region without the parts that the first lower bound rules out, and without repeated ones."""
    size = scope.size()
    kept = _glanced(walk, regions, scope)
    walk.reject(LAYERS, size - kept.size())
    scope = kept._replace(inners=regions.placed(scope.core, kept.inners, scope.states))
    walk.reject(SAME, kept.size() - scope.size())
    return _bounded(walk, regions, scope) if scope.size() else None


def _glanced(walk: Walk, regions: Regions, scope: CoreScope) -> CoreScope:
    """Return the region without the parts that the first lower bound rules out: first by the work of each rank, for
    which no schedule has to be built, then by paths through schedules."""
    costs, one, which = regions.glances.costs(scope.core, scope.inners)
    rough = scope._replace(inners=scope.inners.take(one))
    some, among = _worth(walk, work_seconds(regions, rough, costs))
    rough = rough._replace(pipelines=tuple(compress(scope.pipelines, among)))
    if rough.pipelines:
        some, among = _worth(walk, compute_seconds(regions, rough, costs)[0])
    pipelines = tuple(compress(rough.pipelines, among))
    return scope._replace(inners=scope.inners.take(some[which]), pipelines=pipelines)


def _bounded(walk: Walk, regions: Regions, scope: CoreScope, *, reject: bool = True) -> Region | None:
    """Return the region of a core without the plans that cannot be the best; None when no plan is left."""
    size = scope.size()
    costs = regions.costs(scope.core, scope.inners)
    paths_s, least = compute_seconds(regions, scope, costs)
    some, pipelines = map(np.flatnonzero, _worth(walk, paths_s))
    kept = scope._replace(inners=scope.inners.take(some), pipelines=tuple(scope.pipelines[b] for b in pipelines))
    rejected = Counter({PATHS: size - kept.size()})
    region = None
    if kept.size():
        costs, paths_s, least = costs.rows(some), paths_s[some][:, pipelines], least[some][:, pipelines]
        exchanged = regions.exchanges.exchanged(scope.core, kept.inners, kept.states)
        bound_s, along_s = step_seconds(regions, kept, costs, paths_s, least, exchanged)
        frozen_s = walk.evaluator.frozen_s(scope.core, kept.inners)
        if frozen_s:  # some rank does its share of all work
            whole_s = even_share(regions, scope.core, costs) + frozen_s
            bound_s = np.maximum(bound_s, whole_s[:, None, None])
        legal = kept.legal()
        slow = legal & (bound_s * (1 - ROUNDING) > walk.worth_s)
        full = _full(walk, regions, kept, costs, legal & ~slow)
        bound_s = np.where(slow | full | ~legal, np.inf, bound_s)
        rejected += Counter({PATHS: int(slow.sum()), STATE: int(full.sum())})
        region = Region(kept, costs, bound_s, along_s, paths_s) if np.isfinite(bound_s).any() else None
    if reject:
        walk.bounds(size)
        for reason, count in rejected.items():
            walk.reject(reason, count)
    return region


def _full(walk: Walk, regions: Regions, scope: CoreScope, costs: CoreColumns, among: np.ndarray) -> np.ndarray:
    """Return a mask of the plans `among` [A, B, C] that do not fit."""
    out = np.zeros_like(among)
    a, b = np.flatnonzero(among.any(axis=(1, 2))), np.flatnonzero(among.any(axis=(0, 2)))
    if len(a):
        part = scope._replace(inners=scope.inners.take(a), pipelines=tuple(scope.pipelines[i] for i in b.tolist()))
        need = memory_bytes(regions, part, costs.rows(a))
        out[np.ix_(a, b)] = need * (1 - ROUNDING) > walk.capacity_bytes
    return out & among


def _worth(walk: Walk, bound_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of the inner parts [A] and of the pipelines [B] that have some combination [A, B] worth pricing."""
    worth = bound_s * (1 - ROUNDING) <= walk.worth_s
    return worth.any(axis=1), worth.any(axis=0)


def _leaves(walk: Walk, regions: Regions, found: list[Region]) -> bool:
    """Evaluate the plans that no bound has ruled out, the lowest bound first; False where the search was stopped."""
    bound = [r.bound_s.ravel() for r in found]
    place = [np.flatnonzero(np.isfinite(b)) for b in bound]
    which = np.repeat(np.arange(len(found)), [len(p) for p in place])
    flat = np.concatenate([*place, np.empty(0, np.int64)])
    seconds = np.concatenate([*(b[p] for b, p in zip(bound, place)), np.empty(0)])
    for leaf in np.argsort(seconds, kind="stable").tolist():
        region, at = found[which[leaf]], int(flat[leaf])
        if region.part(at) in walk.tried or region.part(at) in walk.refused:
            continue
        worth = walk.worth_of(*region.part(at))
        if seconds[leaf] * (1 - ROUNDING) > worth:
            walk.reject(PATHS, 1)
        elif region.tightened_s(regions, at) * (1 - ROUNDING) > worth:
            walk.reject(TIMED, 1)
        else:
            walk.evaluate(*region.part(at))
        if walk.stopped:
            return False
    return True
