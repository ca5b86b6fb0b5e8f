"""Walks, and what is looked for besides the best: the plan to recommend, and the fastest that engines do not run.

Both are walks over the same space with a cap: nothing slower than what the first walk found is of use, so they bound
most of the space away at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from math import isfinite

from meshwright.plan import Plan
from meshwright.search.engines import Engine
from meshwright.search.finished import recalled, remember
from meshwright.search.found import Unrunnable
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


def beyond_engines(walk: Walk, strategy: str) -> Unrunnable | None:
    """The fastest plan that fits and that the engines asked for do not run, if it is faster than what they run or
    nothing that they run fits."""
    asked = walk.wanted
    free = walk.again(Wanted(keep=1, room_bytes=asked.room_bytes, cap_s=walk.best_s), "what it costs: ")
    if not walked(free, strategy):
        return None
    faster = [t for t in free.fitting() if t.step_time_s < walk.best_s]
    if not faster:
        return None
    plan, step_time_s, headroom_bytes = faster[0]
    return Unrunnable(
        plan=plan,
        step_time_s=step_time_s,
        headroom_bytes=headroom_bytes,
        wins=1 - step_time_s / walk.best_s if isfinite(walk.best_s) else None,
        reasons=tuple(asked.runnable.reasons(plan)),
    )
