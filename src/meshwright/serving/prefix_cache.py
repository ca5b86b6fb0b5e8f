"""The prefix cache: blocks of keys and values that requests share, kept as long as nobody needs their room.

A block is named by its tokens and all before them (a chain of hashes), so that a common prefix has common names. What
nobody holds is evicted in order of last use, of one request its end first (SGLang's RadixAttention, Zheng et al. 2023,
2312.07104, section 3; vLLM's automatic prefix caching). With a host tier evicted blocks go to the host's memory, and
come back when they are asked for again (Mooncake, Qin et al. 2024, 2407.00079).
"""

from __future__ import annotations

from collections import OrderedDict, deque

from meshwright.errors import MeshwrightError
from meshwright.serving.cache import CacheRules, EngineLimits, KvCache
from meshwright.serving.engine_request import EngineRequest


class PrefixCache(KvCache):
    """A paged cache that shares prefixes. ``refs`` counts who holds each named unit, ``idle`` are those that nobody
    holds, least recently used first, ``host`` those in host memory, ``left`` those of the requests that left last."""

    def __init__(self, limits: EngineLimits, rules: CacheRules):
        super().__init__(limits, rules)
        if rules.unit % limits.block:
            raise MeshwrightError.one(
                "W005",
                f"hashes name {rules.unit} tokens each, which are no whole blocks of {limits.block}",
                place=f"--serve block={limits.block}",
                help=f"a block that divides {rules.unit}",
            )
        self.unit, self.unit_blocks = rules.unit, rules.unit // limits.block
        self.refs: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.host: OrderedDict[int, None] = OrderedDict()
        self.left: deque[tuple[int, ...]] = deque()

    @property
    def free(self) -> int:
        """Blocks that can be given out: empty ones, and those that nobody holds."""
        return super().free + self.unit_blocks * len(self.idle)

    @property
    def quiet(self) -> int:
        """Blocks that can be given out without one that goes to the host's memory."""
        return max(self.bare, 0) if self.rules.host_blocks else self.free

    def has(self, hashes: tuple[int, ...]) -> int:
        """Return how many units of a chain are here, on the device or the host, from its beginning."""
        for i, name in enumerate(hashes):
            if name not in self.refs and name not in self.host:
                return i
        return len(hashes)

    def look(self, one: EngineRequest) -> None:
        """Find the prefix of a request that waits: those tokens need not be computed, but for the last one."""
        if one.swapped or one.running or one.new.computed:
            return
        one.matched = min(self.has(one.new.hashes), (one.target - 1) // self.unit)
        one.computed = one.matched * self.unit

    def needs(self, one: EngineRequest, tokens: int) -> int:
        """Return the free blocks it takes to hold so many tokens: units that others hold take none."""
        wanted = super().needs(one, tokens)
        if one.running or not one.matched:
            return wanted
        refs = self.refs
        return wanted - self.unit_blocks * sum(refs.get(name, 0) > 0 for name in one.new.hashes[: one.matched])

    def hold(self, one: EngineRequest, tokens: int) -> None:
        """Give a request blocks; the first time also the shared ones of its prefix."""
        if one.matched and not one.running and not one.blocks:
            self._pin(one)
        super().hold(one, tokens)

    def _pin(self, one: EngineRequest) -> None:
        """Let a request hold the units of its prefix; those in host memory come back."""
        for name in one.new.hashes[: one.matched]:
            count = self.refs.get(name)
            if count is None:
                del self.host[name]
                self.moved_in += self.unit_blocks
                self.host_free += self.unit_blocks
                self.bare -= self.unit_blocks
            elif count == 0:
                del self.idle[name]
            self.refs[name] = (count or 0) + 1
            one.pinned.append(name)
            one.blocks += self.unit_blocks
        one.units = one.matched

    def _make_bare(self) -> None:
        """Empty units that nobody holds until what was given out is there, then adapters that nobody uses."""
        while self.bare < 0 and self.idle:
            name, _ = self.idle.popitem(last=False)
            del self.refs[name]
            self.bare += self.unit_blocks
            self._to_host(name)
        super()._make_bare()

    def _to_host(self, name: int) -> None:
        if self.rules.host_blocks < self.unit_blocks:
            return
        while self.host_free < self.unit_blocks and self.host:
            self.host.popitem(last=False)
            self.host_free += self.unit_blocks
        if self.host_free >= self.unit_blocks:
            self.host[name] = None
            self.host_free -= self.unit_blocks
            self.moved_out += self.unit_blocks

    def grown(self, one: EngineRequest) -> None:
        """Name the units of a request that are computed now, so that others can share them."""
        self.named(one, one.computed)

    def named(self, one: EngineRequest, tokens: int) -> None:
        """Name the units of the first so many tokens of a request."""
        names, whole = one.new.hashes, tokens // self.unit
        while one.units < min(whole, len(names)):
            name = names[one.units]
            if name not in self.refs:
                self.refs[name] = 1
                one.pinned.append(name)
                if self.host.pop(name, 0) is None:
                    self.host_free += self.unit_blocks
            one.units += 1

    def names_at(self, one: EngineRequest) -> int:
        """Return how many computed tokens make the next unit with a name."""
        return (one.units + 1) * self.unit if one.units < len(one.new.hashes) else 0

    def drop(self, one: EngineRequest) -> None:
        """Take the blocks of a request; those with a name stay until their room is needed."""
        self.bare += one.blocks - self.unit_blocks * len(one.pinned)
        for name in reversed(one.pinned):
            self.refs[name] -= 1
            if not self.refs[name]:
                self.idle[name] = None
        if self.rules.slots and one.units:
            self._keep_last(one.new.hashes[: one.units])
        one.pinned.clear()
        one.blocks = one.units = one.matched = 0
        self._release(one)

    def forget(self) -> None:
        """Drop all units, here and in the host's memory; nobody holds any."""
        self.bare += self.unit_blocks * len(self.idle)
        self.host_free += self.unit_blocks * len(self.host)
        for kept in (self.refs, self.idle, self.host, self.left):
            kept.clear()

    def _keep_last(self, names: tuple[int, ...]) -> None:
        """Give up what nobody holds of requests that left before the last so many."""
        self.left.append(names)
        if len(self.left) <= self.rules.slots:
            return
        gone = self.left.popleft()
        kept = set().union(*self.left)
        for name in gone:
            if name not in kept and name in self.idle:
                del self.idle[name], self.refs[name]
                self.bare += self.unit_blocks
