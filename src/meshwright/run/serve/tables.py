"""Block tables: which physical blocks hold the keys and values of which request.

The deciders of :mod:`meshwright.serving` count blocks and never name one. Behind every decision these tables are
brought to what the decider's cache says: a request that runs has as many blocks as it counts, a named unit of a prompt
has blocks of its own that many requests share (vLLM's and SGLang's prefix caches), and what the decider counts as bare
is free. Nothing here knows tensors: what has to be copied is told in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.serving.batching import Decision, EngineState, Evict
from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.prefix_cache import PrefixCache

#: What lies on the host: a unit by its name, or a swapped request by its number.
HostKey = tuple[str, int]


class BlockCopy(NamedTuple):
    """A copy of the device's ``blocks`` to the host (``out``), which keeps it under ``key`` until it is dropped, or
    back from there."""

    key: HostKey
    blocks: tuple[int, ...]
    out: bool


class HeldBlocks:
    """The blocks of a request: its record in the decider (``one``), its ``table`` in order of its tokens, the names of
    its units when it was last looked at (``pinned``), and how many of its tokens are computed (``reach``)."""

    __slots__ = ("one", "pinned", "reach", "table")

    def __init__(self, one: EngineRequest, shared_blocks: int):
        self.one, self.reach = one, 0
        self.table, self.pinned = [-1] * shared_blocks, 0


class BlockTables:
    """The tables of one engine, following one decider. ``held`` are those of requests by number, ``names`` the blocks
    of every named unit on the device, ``away`` what lies on the host. ``adapters`` are blocks that the weights of
    adapters take, ``dropped`` what the host need not keep any longer."""

    def __init__(self, blocks: int, unit_blocks: int = 1):
        self.unit_blocks = unit_blocks
        self.free: list[int] = list(range(blocks - 1, -1, -1))
        self.held: dict[int, HeldBlocks] = {}
        self.names: dict[int, list[int]] = {}
        self.away: set[HostKey] = set()
        self.adapters: list[int] = []
        self.dropped: list[HostKey] = []

    def computed(self, number: int, tokens: int) -> None:
        """Note that so many tokens of a request are computed, before the decider is told."""
        if number in self.held:
            self.held[number].reach = tokens

    def follow(self, state: EngineState, decisions: Sequence[Decision] = ()) -> list[BlockCopy]:
        """Bring the tables to what a decider's state says; returns the copies to be made before anything is computed,
        in order."""
        shares, out = isinstance(state.cache, PrefixCache), []
        left = [self._evicted(state, d, out) for d in decisions if isinstance(d, Evict) and d.number in self.held]
        now = {one.number: one for one in state.running}
        if state.parked or state.coming:
            now |= {one.number: one for one in (*state.parked.values(), *state.coming.values())}
        if not self.held.keys() <= now.keys():
            now |= {one.number: one for one in state.waiting if one.blocks}
        left += [self.held.pop(number) for number in list(self.held) if number not in now]
        fresh = [one for number, one in now.items() if number not in self.held]
        restored: list[int] = []
        if shares:
            restored = self._units(state.cache, now, fresh, left, out)
        else:
            for holding in left:
                self.free += reversed(holding.table)
        self._adapters(state)
        back = []
        for name in restored:
            self.names[name] = self._take(self.unit_blocks)
            back.append(BlockCopy(("unit", name), tuple(self.names[name]), False))
        for one in fresh:
            self.held[one.number] = HeldBlocks(one, one.matched * self.unit_blocks if one.pinned else 0)
        for one in now.values():
            table = self.held[one.number].table
            if len(table) < one.blocks:
                table += self._take(one.blocks - len(table))
        if shares:
            for one in now.values():
                self._bind(self.held[one.number])
            for one in fresh:
                self._shared(self.held[one.number])
        return out + back + self._swapped_back(state, fresh)

    def _evicted(self, state: EngineState, decision: Evict, out: list[BlockCopy]) -> HeldBlocks:
        holding = self.held.pop(decision.number)
        if decision.swapped:
            key = ("request", decision.number)
            kept = state.cache.limits.blocks_for(holding.one.computed)
            out.append(BlockCopy(key, tuple(holding.table[:kept]), True))
            self.away.add(key)
        return holding

    def _take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise RuntimeError(f"{count} cache blocks are wanted and {len(self.free)} are free")
        found = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return found[::-1]

    # -- named units

    def _units(
        self,
        cache: PrefixCache,
        now: dict[int, EngineRequest],
        fresh: list[EngineRequest],
        left: list[HeldBlocks],
        out: list[BlockCopy],
    ) -> list[int]:
        """Take the blocks of those who left, and forget units that left the device; returns the names of those that
        come back from the host."""
        begun = {one.number: one.matched for one in fresh if one.pinned}
        added: set[int] = set()
        for one in now.values():
            known = self.held[one.number].pinned if one.number in self.held else begun.get(one.number, 0)
            added.update(one.pinned[known:])
        for holding in left:
            self._leave(holding, cache, added)
        for name in added & self.names.keys():  # it left since, and is computed anew
            self.free += reversed(self.names.pop(name))
        wanted = [name for one in fresh for name in one.pinned[: begun.get(one.number, 0)]]
        restored = list(dict.fromkeys(name for name in wanted if name not in self.names and name not in added))
        if len(self.names) + len(added) + len(restored) != len(cache.refs):
            for name in [name for name in self.names if name not in cache.refs]:
                self._forget(name, cache, out)
        coming = {("unit", name) for name in restored}
        gone = [key for key in self.away if key[0] == "unit" and key[1] not in cache.host]
        self.away.difference_update(gone)
        self.dropped += [key for key in gone if key not in coming]
        return restored

    def _leave(self, holding: HeldBlocks, cache: PrefixCache, added: set[int]) -> None:
        """Free the blocks of a request, but for those of units: some got their names when it was last computed."""
        size, table, named = self.unit_blocks, holding.table, set()
        for at, name in enumerate(holding.one.new.hashes):
            if name not in self.names:
                there = name in cache.refs or (name in cache.host and ("unit", name) not in self.away)
                if not there or name in added or holding.reach < (at + 1) * cache.unit:
                    continue
                self.names[name] = table[at * size : (at + 1) * size]
            named.update(self.names[name])
        self.free += [block for block in reversed(table) if block not in named]

    def _forget(self, name: int, cache: PrefixCache, out: list[BlockCopy]) -> None:
        """Free the blocks of a unit, which the host keeps where the decider says so."""
        blocks, key = self.names.pop(name), ("unit", name)
        if name in cache.host and key not in self.away:
            out.append(BlockCopy(key, tuple(blocks), True))
            self.away.add(key)
        self.free += reversed(blocks)

    def _bind(self, holding: HeldBlocks) -> None:
        """Give names to the blocks of a request that it computes, or is about to."""
        one, size = holding.one, self.unit_blocks
        if holding.pinned == len(one.pinned):
            return
        first = holding.pinned or (one.matched if holding.table and holding.table[0] < 0 else 0)
        for name in one.pinned[first:]:
            at = one.new.hashes.index(name) * size
            self.names[name] = holding.table[at : at + size]
        holding.pinned = len(one.pinned)

    def _shared(self, holding: HeldBlocks) -> None:
        """Fill in the blocks of units that others computed."""
        if holding.table and holding.table[0] < 0:
            one = holding.one
            found = [block for name in one.pinned[: one.matched] for block in self.names[name]]
            holding.table[: len(found)] = found

    # -- swapped requests, and adapters

    def _swapped_back(self, state: EngineState, fresh: list[EngineRequest]) -> list[BlockCopy]:
        """Return the copies of requests that were swapped and run again; drop those of whoever left meanwhile."""
        found = []
        for one in fresh:
            key = ("request", one.number)
            if key in self.away:
                self.away.remove(key)
                kept = state.cache.limits.blocks_for(one.computed)
                found.append(BlockCopy(key, tuple(self.held[one.number].table[:kept]), False))
        mine = {key for key in self.away if key[0] == "request"}
        if mine:
            gone = mine - {("request", one.number) for one in state.waiting if one.swapped}
            self.away -= gone
            self.dropped += gone
        return found

    def _adapters(self, state: EngineState) -> None:
        pool = state.cache.adapters
        if pool is None or not pool.rules.blocks:
            return
        there = sum(name >= 0 for name in (*pool.used, *pool.idle))
        wanted = there * pool.rules.blocks - len(self.adapters)
        if wanted < 0:
            self.free += self.adapters[wanted:]
            del self.adapters[wanted:]
        elif wanted:
            self.adapters += self._take(wanted)
