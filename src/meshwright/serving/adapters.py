"""LoRA adapters in the memory of a serving engine: those that are there, who uses them, and which make room.

With unified paging an adapter's weights lie in blocks of the cache of keys and values, as many adapters as there is
room for, and those that nobody uses leave when blocks are needed (S-LoRA, Sheng et al., MLSys 2024, 2311.03285, section
5.1).
With slots so many lie in memory of their own, and no others run beside them (vLLM's ``--max-loras``). Merged into the
model's weights there is one at a time, and whoever needs another waits until all that use it are answered. Where each
is a whole model (a composition of experts, Prabhakar et al. 2405.07518) one runs at a time too, and those that ran last
stay in slots until others need them.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from meshwright.serving.engine_request import EngineRequest


class AdapterRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of adapters: each takes so many ``blocks`` of the cache, at most ``slots`` are used at a time (0: as
    many as have room). ``merged``: requests without an adapter do not run beside one. ``alone``: one is used at a time,
    and ``slots`` have room for it and for those that nobody uses."""

    blocks: int = 0
    slots: int = 0
    merged: bool = False
    alone: bool = False

    @property
    def together(self) -> int:
        """Adapters that may be used at a time, 0 for any number."""
        return 1 if self.alone else self.slots


class AdapterPool:
    """The adapters of an engine: ``used`` by so many requests each (``users`` are all), and ``idle`` ones, least
    recently used first. ``loads`` counts those that were brought to the device."""

    def __init__(self, rules: AdapterRules):
        self.rules = rules
        self.used: dict[int, int] = {}
        self.users: set[int] = set()
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.loads = 0

    @property
    def idle_blocks(self) -> int:
        """Cache blocks of adapters that nobody uses."""
        return self.rules.blocks * len(self.idle)

    def counts(self, one: EngineRequest) -> bool:
        """Return whether a request needs an adapter; merged ones are needed to be gone as well."""
        return one.adapter >= 0 or self.rules.merged

    def allows(self, one: EngineRequest) -> bool:
        """Return whether a request may run beside those that do."""
        most = self.rules.together
        return not most or not self.counts(one) or one.adapter in self.used or len(self.used) < most

    def room_for(self, more: set[int]) -> bool:
        """Return whether so many other adapters may be used beside those that are."""
        return not self.rules.together or len(self.used) + len(more) <= self.rules.together

    def needs(self, one: EngineRequest) -> int:
        """Return the free blocks that the adapter of a request takes: none where others use it."""
        return self.rules.blocks if one.adapter >= 0 and one.adapter not in self.used else 0

    def use(self, one: EngineRequest) -> int:
        """Let a request use its adapter; returns the empty blocks that it takes."""
        name = one.adapter
        if not self.counts(one) or one.number in self.users:
            return 0
        self.users.add(one.number)
        count = self.used.get(name, 0)
        self.used[name] = count + 1
        if count:
            return 0
        if name in self.idle:
            del self.idle[name]
            return 0
        self.loads += name >= 0
        if self.rules.slots:
            while len(self.used) + len(self.idle) > self.rules.slots:
                self.idle.popitem(last=False)
        return self.rules.blocks if name >= 0 else 0

    def release(self, one: EngineRequest) -> None:
        """Note that a request leaves."""
        name = one.adapter
        if one.number not in self.users:
            return
        self.users.remove(one.number)
        self.used[name] -= 1
        if not self.used[name]:
            del self.used[name]
            self.idle[name] = None

    def give_up(self) -> int:
        """Drop the adapter that nobody has used for the longest time; returns its blocks."""
        self.idle.popitem(last=False)
        return self.rules.blocks

    def loaded(self) -> int:
        """Return how many adapters were brought to the device since the last call."""
        found, self.loads = self.loads, 0
        return found
