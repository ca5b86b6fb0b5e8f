"""The cache of keys and values as a serving engine sees it: blocks of tokens, held by requests.

Blocks are given out one by one, as tokens are computed (paged attention: Kwon et al., SOSP 2023, 2309.06180, section
4). :class:`meshwright.serving.prefix_cache.PrefixCache` also keeps those of requests that have left.
"""

from __future__ import annotations

from math import ceil, inf

import msgspec

from meshwright.serving.adapters import AdapterPool, AdapterRules
from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.kv_budget import tokens_kept


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a serving engine: at most ``max_batch`` sequences at a time and ``budget`` tokens an iteration, and
    ``blocks`` cache blocks of ``block`` tokens. ``device_share``: what a KV budget keeps of a context on the device,
    above 1 so many tokens of each. It looks for new requests once in ``poll`` iterations of decoding, and lets prompts
    wait for up to ``batch_wait`` of them until those that wait ``fill`` a share of the budget, or each of its attention
    ``groups`` has one, and for ``settle`` more (:mod:`meshwright.serving.gate`)."""

    max_batch: int
    budget: int
    block: int
    blocks: int
    device_share: float = 1.0
    poll: int = 1
    batch_wait: int = 0
    fill: float = 0.0
    groups: int = 1
    settle: int = 0

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        if self.device_share != 1.0:
            tokens = tokens_kept(tokens, self.device_share)
        return -(-tokens // self.block)

    def holds(self, blocks: int) -> float:
        """Return the tokens of a context that so many blocks hold; any number where none of it stays on the device, or
        all that do stay have room."""
        if not self.device_share:
            return inf if blocks >= 0 else 0.0
        if self.device_share > 1.0:
            return inf if blocks * self.block >= self.device_share else float(blocks * self.block)
        return blocks * self.block / self.device_share

    def longest(self, blocks: int) -> int:
        """Return the most tokens of a context that so many blocks hold, of a budget that keeps some on the device."""
        found = int(min(self.holds(blocks), 1 << 40))
        return found if self.blocks_for(found) <= blocks else found - 1

    @property
    def tokens(self) -> float:
        """Tokens that all blocks hold."""
        return self.holds(self.blocks)

    @property
    def apart(self) -> bool:
        """Whether it matters which attention group a request belongs to: prompts wait until each has one."""
        return self.groups > 1 and self.batch_wait > 0

    @property
    def enough(self) -> int:
        """Tokens of an iteration that prompts wait for; more than there can be where nothing was said."""
        return ceil(self.fill * self.budget) if self.fill and self.budget else self.budget + 1

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free where a policy keeps some for sequences that grow: 1% (vLLM V0)."""
        return self.blocks // 100


class CacheRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a cache. ``prefix``: blocks of a common prefix are shared, and kept when nobody holds them; a name
    (hash) stands for ``unit`` tokens. ``swap``: a request that is evicted is moved to the host's memory, of
    ``host_blocks`` blocks, where there is room, and not computed again; shared blocks that leave the device are kept
    there too. ``chunks`` above 0: names are of texts wherever they stand, which are kept on the host, and that share of
    their tokens is computed again. ``adapters``: requests use LoRA adapters. ``borrow``: blocks may be of other
    replicas, and others may have some of this one. ``slots`` above 0: what nobody holds is kept of so many requests
    that left last, as llama.cpp keeps one sequence in each of its slots."""

    prefix: bool = False
    unit: int = 16
    swap: bool = False
    host_blocks: int = 0
    adapters: AdapterRules | None = None
    chunks: float = 0.0
    borrow: bool = False
    slots: int = 0


class KvCache:
    """A paged cache: ``free`` blocks, and those moved between device and host since the counters were last taken."""

    def __init__(self, limits: EngineLimits, rules: CacheRules):
        self.limits, self.rules = limits, rules
        self.bare, self.host_free = limits.blocks, rules.host_blocks
        self.moved_in = self.moved_out = 0
        self.adapters = AdapterPool(rules.adapters) if rules.adapters is not None else None

    @property
    def free(self) -> int:
        """Blocks that can be given out: empty ones, and those of adapters that nobody uses."""
        return self.bare + (self.adapters.idle_blocks if self.adapters is not None else 0)

    @property
    def total(self) -> int:
        """Blocks that there are."""
        return self.limits.blocks

    @property
    def told_apart(self) -> bool:
        """Whether it matters which request gets a block."""
        return False

    @property
    def quiet(self) -> int:
        """Blocks that can be given out without one that goes to the host's memory."""
        return self.free

    def allows(self, one: EngineRequest) -> bool:
        """Return whether a request may run beside those that do, if there are blocks for it."""
        return self.adapters is None or self.adapters.allows(one)

    def has(self, hashes: tuple[int, ...]) -> int:
        """Return how many blocks of a prefix are here: none, as those of whoever left are not kept."""
        return 0

    def look(self, one: EngineRequest) -> None:
        """Find what the cache has of a request that waits: here nothing that it did not bring."""

    def needs(self, one: EngineRequest, tokens: int) -> int:
        """Return the free blocks it takes to hold so many tokens of a request."""
        wanted = self.limits.blocks_for(tokens) - one.blocks
        return wanted + self.adapters.needs(one) if self.adapters is not None and not one.running else wanted

    def hold(self, one: EngineRequest, tokens: int) -> None:
        """Give a request blocks until it holds so many tokens; there have to be as many as it :meth:`needs`."""
        wanted = self.limits.blocks_for(tokens)
        if self.adapters is not None and not one.running:
            self.bare -= self.adapters.use(one)
        if wanted > one.blocks:
            self.bare -= wanted - one.blocks
            one.blocks = wanted
        self._make_bare()

    def take(self, blocks: int) -> None:
        """Give out so many blocks; whoever asks knows to whom."""
        self.bare -= blocks
        self._make_bare()

    def _make_bare(self) -> None:
        """Empty blocks of adapters that nobody uses until what was given out is there."""
        while self.bare < 0 and self.adapters is not None:
            self.bare += self.adapters.give_up()

    def drop(self, one: EngineRequest) -> None:
        """Take the blocks of a request."""
        self.bare += one.blocks
        one.blocks = 0
        self._release(one)

    def _release(self, one: EngineRequest) -> None:
        """Note that a request does not use its adapter any more."""
        if self.adapters is not None:
            self.adapters.release(one)

    def grown(self, one: EngineRequest) -> None:
        """Note that more of a request is computed."""

    def named(self, one: EngineRequest, tokens: int) -> None:
        """Note that so many tokens of a request are computed, or are in this iteration."""

    def names_at(self, one: EngineRequest) -> int:
        """Return how many computed tokens of a request it next wants to be told of, 0 for none."""
        return 0

    def evict(self, one: EngineRequest) -> None:
        """Take the blocks of a request that goes on later: to the host where it swaps and has room, else they are lost
        and computed again."""
        kept = self.limits.blocks_for(one.computed)
        self.drop(one)
        if self.rules.swap and 0 < kept <= self.host_free:
            self.host_free -= kept
            self.moved_out += kept
            one.swapped = True
        else:
            one.computed = 0

    def forget(self) -> None:
        """Drop all that is kept of requests that have left; nobody runs."""

    def back(self, one: EngineRequest) -> None:
        """Bring what was swapped of a request back, which holds its blocks again."""
        kept = self.limits.blocks_for(one.computed)
        self.host_free += kept
        self.moved_in += kept
        one.swapped = False

    def adapters_loaded(self) -> int:
        """Return the adapters brought to the device since the last call."""
        return self.adapters.loaded() if self.adapters is not None else 0

    def moved(self) -> tuple[int, int]:
        """Return the blocks moved in and out since the last call."""
        found = self.moved_in, self.moved_out
        self.moved_in = self.moved_out = 0
        return found
