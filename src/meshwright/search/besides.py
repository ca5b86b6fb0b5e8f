"""Walks, and what is looked for besides the best: the plan to recommend, and the fastest that a demand excludes.

Both are walks over the same space with a cap: nothing slower than what the first walk found is of use, so they bound
most of the space away at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from math import ceil, isfinite

import msgspec

from meshwright.answer.risk import fit_probability
from meshwright.plan import Plan
from meshwright.search.engines import Engine
from meshwright.search.finished import recalled, remember
from meshwright.search.found import Excluded
from meshwright.search.recommend import settled_already, wanted
from meshwright.search.walk import Stopped, Tried, Walk, Wanted
from meshwright.search.warm import warm


def walked(walk: Walk, strategy: str, first: Iterable[Plan] = ()) -> bool:
    """Whether the best is proven after a strategy's walk, which somebody may stop; `first` are evaluated first. A walk
    that was finished before is not walked again."""
    try:
        proven = recalled(walk, strategy)
        if proven is None:
            warm(walk, first)
            proven = import_module(f"meshwright.search.strategies.{strategy}").run(walk)
            remember(walk, strategy, proven)
        return proven
    except Stopped:
        return False
    except KeyboardInterrupt:
        if walk.stopped:  # the second one: nobody waits for the answer
            raise
        walk.stopped = True
        return False


def to_recommend(walk: Walk, strategy: str, engines: Sequence[Engine]) -> list[Tried]:
    """Plans to recommend that `walk` had no reason to look at, as it found faster ones."""
    if settled_already(walk, engines):
        return []
    roomy = walk.again(wanted(walk, engines), "a plan to recommend: ")
    walked(roomy, strategy)
    return roomy.fitting()


def beyond_engines(walk: Walk, strategy: str) -> Excluded | None:
    """The fastest plan that fits and that the engines asked for do not run, if it is faster than what they run or
    nothing that they run fits."""
    asked = walk.wanted
    faster = _faster(
        walk,
        strategy,
        Wanted(keep=1, room_bytes=asked.room_bytes, cap_s=walk.best_s),
        "plans that the engine does not run: ",
    )
    return faster and _excluded(walk, faster, asked.runnable.reasons(faster.plan))


def beyond_risk(walk: Walk, strategy: str) -> Excluded | None:
    """The fastest plan that leaves less room than is usual, if it is faster than those that leave it."""
    loose = msgspec.structs.replace(walk.wanted, keep=1, families=False, room_bytes=0.0, cap_s=walk.best_s)
    faster = _faster(walk, strategy, loose, "plans that leave less memory: ")
    if faster is None:
        return None
    capacity = walk.capacity_bytes + walk.wanted.room_bytes
    sigma = walk.evaluator.costs.framework.memory_sigma
    chance = fit_probability(capacity - faster.headroom_bytes, capacity, sigma)
    risk = f"--risk {min(50, ceil(100 * (1 - chance)))}%"
    return _excluded(walk, faster, [f"fits with a probability of {chance:.0%}: {risk} takes it"])


def _faster(walk: Walk, strategy: str, wanted: Wanted, what: str) -> Tried | None:
    """The fastest plan that is wanted, if it is faster than the walk's best."""
    free = walk.again(wanted, what)
    if not walked(free, strategy):
        return None
    return next((t for t in free.fitting() if t.step_time_s < walk.best_s), None)


def _excluded(walk: Walk, faster: Tried, reasons: Iterable[str]) -> Excluded:
    return Excluded(
        plan=faster.plan,
        step_time_s=faster.step_time_s,
        headroom_bytes=faster.headroom_bytes,
        wins=1 - faster.step_time_s / walk.best_s if isfinite(walk.best_s) else None,
        reasons=tuple(reasons),
    )
