"""A cache that can be larger or smaller than its memory: some of its blocks lie in other replicas' memory, or are lent.

DistAttention (Lin et al. 2024, 2401.02669, section 4) cuts attention into parts by cache blocks, each computed where
the block lies, so that a block may lie anywhere. Blocks at home are given out first, and none ever moves: of every
request the cache knows how many of its blocks are away.
"""

from __future__ import annotations

from meshwright.serving.cache import CacheRules, EngineLimits, KvCache
from meshwright.serving.engine_request import EngineRequest


class BorrowedCache(KvCache):
    """A paged cache with ``borrowed`` blocks of other replicas, ``away`` of which are free, and without the blocks that
    it ``lent``."""

    def __init__(self, limits: EngineLimits, rules: CacheRules):
        super().__init__(limits, rules)
        self.borrowed = self.lent = self.away = 0

    @property
    def total(self) -> int:
        """Blocks that there are for its own requests."""
        return self.limits.blocks + self.borrowed - self.lent

    @property
    def free(self) -> int:
        """Blocks that can be given out, here and elsewhere."""
        return self.bare + self.away

    @property
    def told_apart(self) -> bool:
        """Whether it matters which request gets a block: some of them are away."""
        return self.borrowed > 0

    def hold(self, one: EngineRequest, tokens: int) -> None:
        """Give a request blocks until it holds so many tokens, those at home first."""
        more = self.limits.blocks_for(tokens) - one.blocks
        if more <= 0:
            return
        here = min(more, self.bare)
        self.bare -= here
        self.away -= more - here
        one.away += more - here
        one.blocks += more

    def drop(self, one: EngineRequest) -> None:
        """Take the blocks of a request, here and elsewhere."""
        self.away += one.away
        one.blocks -= one.away
        one.away = 0
        super().drop(one)

    def tokens_away(self, one: EngineRequest, tokens: int) -> int:
        """Return how many of the first so many tokens of a request are away: those behind its blocks at home."""
        return max(0, tokens - (one.blocks - one.away) * self.limits.block)

    def moved_border(self, blocks: int, *, lends: bool) -> None:
        """Move the border of the cache by so many blocks: those of others that it may give out from now on, or may not
        any more (below 0); where it `lends`, its own that others may (above 0), or that are back (below 0)."""
        if lends:
            self.lent += blocks
            self.bare -= blocks
        else:
            self.borrowed += blocks
            self.away += blocks
