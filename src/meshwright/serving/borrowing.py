"""Borrowing: how an engine whose cache runs out asks for blocks of other replicas, and what it can lend itself.

It asks ahead, for the iteration after the one that it has planned, and gives back what nobody needs: a request that
waits holds nothing, so that engines do not wait for each other. What it can lend is what its running requests will not
need, however long their answers become (Lin et al. 2024, 2401.02669, section 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshwright.serving.borrowed_cache import BorrowedCache
from meshwright.serving.lending import NOBODY

if TYPE_CHECKING:
    from meshwright.serving.batching import BatchPolicy, EngineState


#: Blocks asked for by an engine that has to say anew how many it lacks.
UNSAID = -1


class Resized(msgspec.Struct, frozen=True, tag=True):
    """So many blocks of others may be given out from now on, or may not any more (below 0). With ``lends`` so many of
    this engine's may be by another one (above 0), or are back (below 0)."""

    blocks: int
    lends: bool = False


class Borrow(msgspec.Struct, frozen=True, tag=True):
    """The engine lacks ``wanted`` blocks in place of what it said before, for the request ``oldest`` or younger ones,
    and gives ``returned`` borrowed ones back."""

    wanted: int
    oldest: int = NOBODY
    returned: int = 0


def resize(state: EngineState, event: Resized) -> None:
    """Let a cache be larger or smaller; what was lent is not asked for again, and whoever lends says anew what it
    lacks."""
    cache = state.cache
    assert isinstance(cache, BorrowedCache)
    cache.moved_border(event.blocks, lends=event.lends)
    if event.blocks > 0 and event.lends:
        state.asked = Borrow(UNSAID)
    elif event.blocks > 0:
        left = state.asked.wanted - event.blocks
        state.asked = Borrow(left, state.asked.oldest) if left > 0 else Borrow(0)


def borrowing(state: EngineState, policy: BatchPolicy) -> tuple[Borrow, ...]:
    """Return what is to be said of the blocks that an engine lacks behind the iteration that is planned, and gives
    back; nothing where that was said."""
    cache = state.cache
    if not isinstance(cache, BorrowedCache):
        return ()
    limits, oldest, free = cache.limits, NOBODY, cache.free
    running = 0 if policy.reserves else sum(_next_blocks(state, one) for one in state.running)
    if running > free:
        oldest = min(one.number for one in state.running)
    first = state.waiting.first(cache) if len(state.running) < limits.max_batch else None
    need = running
    if first is not None:
        tokens = first.prompt + first.limit
        need += limits.blocks_for(tokens if policy.reserves else min(first.target + 1, tokens))
        need += limits.watermark if policy.watermark else 0
        oldest = min(oldest, first.number) if need > free else oldest
    returned = min(cache.away, max(free - (need if need <= free else running), 0))  # whoever waits holds nothing
    cache.moved_border(-returned, lends=False)
    lacks = max(need - free + returned, 0)
    said = Borrow(lacks, oldest if lacks else NOBODY)
    if said == state.asked and not returned:
        return ()
    state.asked = said
    return (msgspec.structs.replace(said, returned=returned),)


def _next_blocks(state: EngineState, one) -> int:
    """The blocks that a running request may take until its next token is there: one where it decodes."""
    if one.decodes:
        return 1
    tokens = min(one.target + 1, one.prompt + one.limit)
    return max(state.cache.limits.blocks_for(tokens) - one.blocks, 1)


def steady_iterations(state: EngineState, room: int) -> int:
    """Return how many iterations of everybody's next token are alike with so many free blocks: in none of them has the
    engine anything to ask for, and nothing is borrowed or lent."""
    cache, running = state.cache, len(state.running)
    if not isinstance(cache, BorrowedCache):
        return room // running * cache.limits.block + 1
    if cache.borrowed or cache.lent or state.asked.wanted:
        return 1
    return max(room - running, 0) // running * cache.limits.block + 1


def spare_blocks(state: EngineState) -> int:
    """Return the blocks that an engine can lend: those that its running requests will not need, with the longest
    answers they may have. Whoever borrows has none."""
    cache = state.cache
    assert isinstance(cache, BorrowedCache)
    if cache.borrowed:
        return 0
    limits = cache.limits
    return max(
        0, cache.total - sum(max(one.blocks, limits.blocks_for(one.prompt + one.limit)) for one in state.running)
    )


def tokens_away(state: EngineState) -> tuple[tuple[int, int], ...]:
    """Return the tokens of those in the iteration that are in other replicas' memory, by request."""
    cache = state.cache
    if not isinstance(cache, BorrowedCache) or not cache.borrowed:
        return ()
    at = {one.number: one for one in state.running}
    away = ((s.number, cache.tokens_away(at[s.number], s.past + s.new)) for s in state.shares)
    return tuple((number, tokens) for number, tokens in away if tokens)
