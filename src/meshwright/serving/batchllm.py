"""BatchLLM: a batch that is known as a whole is served by groups of a common prefix (Zheng et al., MLSys 2026,
2412.03594).

Requests that share a prefix run one behind the other, so that it is computed once and its blocks are free when the
group is through. A prompt may share a short prefix with many and a longer one with few; of a tree of prefixes each
request gets the one with which the most tokens are saved in all, by a dynamic program over the tree. Groups
that generate much for what they read go first, so that their next tokens ride along with the prompts of later ones.
How many run is up to the cache alone where ``max_batch=`` is large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from meshwright.serving.engine_request import EngineRequest
from meshwright.serving.fcfs import SettledQueue, WaitingQueue

if TYPE_CHECKING:
    from meshwright.serving.cache import KvCache


class GroupedQueue(SettledQueue):
    """A queue by groups of a common prefix, last first (``waiting``); ``stale`` where requests came since."""

    ranks = False
    reads_cache = False

    def __init__(self) -> None:
        self.waiting: list[EngineRequest] = []
        self.stale = False

    def add(self, one: EngineRequest) -> None:
        """Let a request wait with those of its prefix."""
        self.waiting.append(one)
        self.stale = True

    def back(self, one: EngineRequest) -> None:
        """Let a request wait before all others: its group is under way."""
        self.waiting.append(one)

    def first(self, cache: KvCache) -> EngineRequest | None:
        """Return the next request of the group under way, or the first of the next one."""
        if self.stale:
            self.waiting = arranged(self.waiting)[::-1]
            self.stale = False
        return self.waiting[-1] if self.waiting else None

    def take(self, one: EngineRequest) -> None:
        """Note that a request runs now."""
        if self.waiting[-1] is one:
            self.waiting.pop()
        else:
            self.waiting.remove(one)

    drop = take

    def rank(self, one: EngineRequest) -> int:
        """Return when it came."""
        return one.order

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[EngineRequest]:
        return reversed(self.waiting)


def arranged(requests: Sequence[EngineRequest]) -> list[EngineRequest]:
    """Return requests by groups of a common prefix, those first that generate most for what they read, and in a group
    likewise."""

    def decodes(one: EngineRequest) -> float:
        return one.limit / one.prompt

    found = []
    for group in groups([one.new.hashes for one in requests]):
        mine = sorted((requests[i] for i in group), key=lambda one: (-decodes(one), one.order))
        ratio = sum(one.limit for one in mine) / sum(one.prompt for one in mine)
        found.append((-ratio, min(one.order for one in mine), mine))
    return [one for _, _, mine in sorted(found, key=lambda group: group[:2]) for one in mine]


def groups(chains: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return the places of chains of block names in groups that share a beginning, such that what the groups save in
    all, the blocks of their common beginning for every member but the first, is the most that one beginning for each
    chain can save."""
    order = sorted(range(len(chains)), key=lambda i: chains[i])
    saved: list[tuple[int, list[tuple[int, int]]]] = []  # of every open range of chains: what it saves, by which groups
    opened: list[tuple[int, int]] = []  # (common blocks, first chain) of every open range, ever longer beginnings
    best: list[tuple[int, int]] = []
    for at in range(1, len(order) + 1):
        common = _common(chains[order[at - 1]], chains[order[at]]) if at < len(order) else 0
        first = at - 1
        while opened and opened[-1][0] > common:
            depth, first = opened.pop()
            inner, parts = saved.pop()
            own = depth * (at - 1 - first)
            found = (own, [(first, at)]) if own >= inner else (inner, parts)
            if opened and opened[-1][0] >= common:
                saved[-1] = (saved[-1][0] + found[0], saved[-1][1] + found[1])
            elif common:
                opened.append((common, first))
                saved.append(found)
                break
            else:
                best += found[1]
        else:
            if common and (not opened or opened[-1][0] < common):
                opened.append((common, first))
                saved.append((0, []))
    grouped = {i for first, last in best for i in range(first, last)}
    alone = [[order[i]] for i in range(len(order)) if i not in grouped]
    return [[order[i] for i in range(first, last)] for first, last in best] + alone


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    for i, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return i
    return min(len(one), len(other))


class BatchLlm(msgspec.Struct, frozen=True):
    """The policy."""

    name: str = "batchllm"
    title: str = "by groups of a common prefix, those that generate most first (BatchLLM)"
    goes_by: str = "hashes"

    def open(self) -> WaitingQueue:
        """Return an empty queue."""
        return GroupedQueue()


POLICY = BatchLlm()
