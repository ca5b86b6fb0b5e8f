"""Walks that were finished before: with a store, what was proven once is not proven again.

A walk is kept by all that decides it: the question and the code, which the store knows, the space, the strategy and
what is wanted. It comes back by looking again at the points it evaluated, whose answers the store has too, and by its
counts.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec

from meshwright.search.space import Core, Inner, Piped, State
from meshwright.search.walk import Walk


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a finished walk: the points it evaluated, its counts, and whether its best is proven."""

    points: list[tuple[Core, Inner, Piped, State]]
    covered: int
    bounded: int
    rejected: dict[str, int]
    proven: bool


def recalled(walk: Walk, strategy: str) -> bool | None:
    """Whether the best is proven, of a walk that was finished before, which then is as if it had been walked now; None
    when there is none."""
    kept = walk.keeper.finished(_asked(walk, strategy)) if walk.keeper else None
    if kept is None:
        return None
    found = msgspec.json.decode(kept, type=Finished)
    walk.covers(found.covered)
    for point in found.points:
        walk.evaluate(*point)
    walk.recalled, walk.bounded, walk.rejected = True, found.bounded, Counter(found.rejected)
    return found.proven


def remember(walk: Walk, strategy: str, proven: bool) -> None:
    """Keep a walk that nobody stopped."""
    if walk.keeper is None or walk.stopped:
        return
    found = Finished(
        points=list(walk.tried),
        covered=walk.covered,
        bounded=walk.bounded,
        rejected=dict(walk.rejected),
        proven=proven,
    )
    walk.keeper.finish(_asked(walk, strategy), msgspec.json.encode(found))


def _asked(walk: Walk, strategy: str) -> str:
    """Return a digest of the request of a walk over a question's plans."""
    wanted = msgspec.structs.asdict(walk.wanted)
    wanted["runnable"] = walk.wanted.runnable.label if walk.wanted.runnable else None
    said = msgspec.json.encode([strategy, walk.space.domains, wanted], order="deterministic")
    return hashlib.sha256(said).hexdigest()[:16]
