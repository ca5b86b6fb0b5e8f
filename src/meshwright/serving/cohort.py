"""The cohort of an engine: its sequences that decode a token each in every iteration, advanced together.

Most of a batch does the same in most iterations: a token computed, one generated. What such a sequence has done is kept
relative to the iterations that its cohort has been through, so that an iteration of a hundred of them costs what one of
three does. The blocks that they take follow from how many of them stand at which place of a block.
"""

from __future__ import annotations

import heapq

from meshwright.serving.cache import KvCache
from meshwright.serving.engine_request import STILL, EngineRequest, Pace
from meshwright.serving.fcfs import FOR_EVER


class Cohort:
    """The sequences that decode together: ``members`` by number, ``numbers`` in order of joining, with ``context``
    computed tokens in all and so many of every tenant (``tenants``).

    ``on``: the policy computes it as one, which has to be ``allowed``. ``ahead`` is 1 where an iteration of it is under
    way, whose blocks are given out already. It ``grows`` where blocks are given out as tokens are computed, and not
    reserved for whole answers."""

    def __init__(self, block: int, *, grows: bool, allowed: bool = True):
        self.block, self.grows, self.allowed = block, grows, allowed
        self.pace, self.on, self.ahead = Pace(), False, 0
        self.members: dict[int, EngineRequest] = {}
        self.tenants: dict[int, int] = {}
        self.context = 0
        self.phase = [0] * block
        self.wakes: list[tuple[int, int]] = []
        self.wake_of: dict[int, int] = {}
        self._numbers: tuple[int, ...] | None = ()

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, one: EngineRequest) -> bool:
        return one.pace is self.pace

    @property
    def numbers(self) -> tuple[int, ...]:
        """The members' numbers: the same object as long as they are the same."""
        if self._numbers is None:
            self._numbers = tuple(self.members)
        return self._numbers

    def takes(self, one: EngineRequest) -> bool:
        """Return whether a sequence decodes as the members do: its next token alone, with the blocks it needs."""
        return one.decodes and one.running and (not self.grows or one.blocks == -(-one.computed // self.block))

    def join(self, one: EngineRequest, cache: KvCache) -> None:
        """Let a sequence decode with the others."""
        computed = one.computed
        self.context += computed
        self.tenants[one.new.tenant] = self.tenants.get(one.new.tenant, 0) + 1
        self.phase[(computed - self.pace.ticks) % self.block] += 1
        one.follow(self.pace)
        self.members[one.number] = one
        self._numbers = None
        self._wake(one, cache)

    def leave(self, one: EngineRequest) -> None:
        """Let a sequence go on by itself, with the blocks that are given out to it."""
        one.follow(STILL)
        del self.members[one.number]
        self.wake_of.pop(one.number, None)
        self._numbers, computed = None, one.computed
        self.context -= computed
        self.tenants[one.new.tenant] -= 1
        self.phase[(computed - self.pace.ticks) % self.block] -= 1
        if self.grows:
            one.blocks = max(one.blocks, -(-(computed + self.ahead) // self.block))

    def disband(self) -> None:
        """Let all of them go on by themselves."""
        for one in list(self.members.values()):
            self.leave(one)

    def growth(self, times: int) -> int:
        """Return the blocks that all take for so many iterations more, behind the one under way."""
        if not self.grows or not self.members:
            return 0
        first = self.pace.ticks + self.ahead
        if times <= 1:
            return self.phase[-first % self.block] if times else 0
        cycles, rest = divmod(times, self.block)
        end = -first % self.block + 1  # of the places that come to a block's end one after the other, backwards
        begin = end - rest
        some = sum(self.phase[max(begin, 0) : end]) + (sum(self.phase[begin:]) if begin < 0 else 0)
        return cycles * len(self.members) + some

    @property
    def until_named(self) -> int:
        """Iterations until the cache next names what one of them has computed."""
        return self.wakes[0][0] - self.pace.ticks if self.wakes else FOR_EVER

    def tick(self, times: int, cache: KvCache) -> None:
        """Note that the iteration under way is over, and as many after it as make so many."""
        start, taken = self.pace.ticks, 0  # what is named goes with the blocks that are given out until then
        while self.wakes and self.wakes[0][0] <= start + times:
            at, number = heapq.heappop(self.wakes)
            if self.wake_of.get(number) == at:
                one, after = self.members[number], at - start
                blocks = self.growth(after - 1)
                cache.take(blocks - taken)
                taken = blocks
                cache.named(one, one.computed + after)
                self._wake(one, cache)
        cache.take(self.growth(times - 1) - taken)
        self.ahead = 0
        self.pace.ticks += times
        self.context += times * len(self.members)

    def _wake(self, one: EngineRequest, cache: KvCache) -> None:
        """Note when the cache next wants to know how far a sequence is."""
        tokens = cache.names_at(one)
        if tokens:
            at = self.pace.ticks + tokens - one.computed
            self.wake_of[one.number] = at
            heapq.heappush(self.wakes, (at, one.number))
