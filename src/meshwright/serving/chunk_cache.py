"""The chunk cache: keys and values of texts that prompts contain anywhere, and a part of them computed again.

Prompts with retrieved texts (chunks) share these in other orders, where a prefix cache finds nothing behind the first
difference. Cache-Craft (Agarwal et al., SIGMOD 2025, 2502.15734) keeps the keys and values of chunks in tiers behind
the device and computes again those tokens that depended most on what stood before them; a chunk's cache is copied into
the request's own blocks, layer by layer while the layers before are computed.
"""

from __future__ import annotations

from collections import OrderedDict

from meshwright.serving.cache import CacheRules, EngineLimits, KvCache
from meshwright.serving.engine_request import EngineRequest


class ChunkCache(KvCache):
    """A paged cache beside a store of chunks in the host's memory: ``store``, least recently used first."""

    def __init__(self, limits: EngineLimits, rules: CacheRules):
        super().__init__(limits, rules)
        self.unit_blocks = -(-rules.unit // limits.block)
        self.store: OrderedDict[int, None] = OrderedDict()

    def has(self, hashes: tuple[int, ...]) -> int:
        """Return how many of these chunks are in the store, wherever they stand."""
        return sum(name in self.store for name in hashes)

    def look(self, one: EngineRequest) -> None:
        """Find the chunks of a request that waits: of each only a share of the tokens is computed again."""
        if one.swapped or one.running or one.new.computed:
            return
        one.matched = self.has(one.new.hashes)
        one.computed = min(int(one.matched * self.rules.unit * (1.0 - self.rules.chunks)), one.target - 1)

    def hold(self, one: EngineRequest, tokens: int) -> None:
        """Give a request blocks; the first time its chunks come from the store."""
        if one.matched and not one.running and not one.blocks:
            self.moved_in += one.matched * self.unit_blocks
            for name in one.new.hashes:
                if name in self.store:
                    self.store.move_to_end(name)
        super().hold(one, tokens)

    def grown(self, one: EngineRequest) -> None:
        """Keep the chunks of a request whose prompt is computed."""
        if one.units or one.computed < one.prompt:
            return
        one.units = 1
        for name in one.new.hashes:
            if name in self.store or self.unit_blocks > self.rules.host_blocks:
                continue
            while self.host_free < self.unit_blocks and self.store:
                self.store.popitem(last=False)
                self.host_free += self.unit_blocks
            if self.host_free >= self.unit_blocks:
                self.store[name] = None
                self.host_free -= self.unit_blocks
                self.moved_out += self.unit_blocks

    def drop(self, one: EngineRequest) -> None:
        """Take the blocks of a request."""
        super().drop(one)
        one.units = one.matched = 0
