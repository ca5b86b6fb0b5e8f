"""Chains of blocks: the decider of where blocks of models lie, which instance a request goes to, and what it does.

BlockLLM (Hu et al. 2024, 2404.18322) cuts models into blocks, keeps equivalent ones once for all tenants, and lets
every request go through the chain of its model. Each instance of a block has a queue of its own and batches whoever is
there, of any tenant. Three decisions are made here, without a clock: blocks are placed so that places have equal loads
and chains stay where they are (:func:`placed`); a request prefers the instance that holds its keys and values, and
leaves it where another one is sooner though they are moved there or computed again (:func:`chosen`); and an instance
computes those that wait together, next tokens first (:func:`batched`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

#: Largest load of a place over the mean at which no block gets another instance.
EVEN = 1.05


class BlockLoad(msgspec.Struct, frozen=True):
    """A block to be placed: its ``num_bytes``, its share of all ``work``, and the blocks ``before`` it in chains."""

    num_bytes: float
    work: float
    before: tuple[int, ...] = ()


def placed(blocks: Sequence[BlockLoad], places: int, room_bytes: float) -> tuple[tuple[int, ...], ...]:
    """Return which blocks lie at each place, every one of them somewhere; nothing where there is no room for all.

    A block goes where one before it lies if that place has no more than its part of the work, else to the one with the
    least. Then the block with most work at the place with most gets another instance at the one with least, which
    takes an equal part of it, until places are even or have no room."""
    mean = sum(one.work for one in blocks) / places
    held: list[list[int]] = [[] for _ in range(places)]
    load, room = [0.0] * places, [room_bytes] * places
    for number, one in enumerate(blocks):
        able = [place for place in range(places) if room[place] >= one.num_bytes]
        if not able:
            return ()
        near = [p for p in able if any(b in held[p] for b in one.before) and load[p] + one.work <= mean * (1 + 1e-9)]
        place = min(near or able, key=lambda p: (load[p], p))
        held[place].append(number)
        load[place] += one.work
        room[place] -= one.num_bytes
    while True:
        number = [sum(b in some for some in held) for b in range(len(blocks))]
        load = [sum(blocks[b].work / number[b] for b in some) for some in held]
        most, least = max(range(places), key=lambda p: load[p]), min(range(places), key=lambda p: load[p])
        able = [b for b in held[most] if b not in held[least] and blocks[b].num_bytes <= room[least]]
        if load[most] <= EVEN * mean or not able:
            return tuple(map(tuple, held))
        heaviest = max(able, key=lambda b: (blocks[b].work / number[b], -b))
        held[least].append(heaviest)
        room[least] -= blocks[heaviest].num_bytes


class BlockInstance(NamedTuple):
    """An instance that a request may go to: its ``place``, the seconds until it is reached and has computed what it has
    (``wait_s``), and whether it ``holds`` the request's keys and values. Where it does not they are there ``move_s``
    later, or the request begins again and is back after ``again_s``."""

    place: int
    wait_s: float
    holds: bool = False
    move_s: float = 0.0
    again_s: float = float("inf")

    @property
    def ready_s(self) -> float:
        """Seconds until the request can be computed there."""
        return self.wait_s if self.holds else self.wait_s + min(self.move_s, self.again_s)


class ChosenInstance(NamedTuple):
    """Where a request goes, and whether its keys and values ``move`` there or are computed ``again``."""

    place: int
    move: bool = False
    again: bool = False


def chosen(instances: Sequence[BlockInstance]) -> ChosenInstance:
    """Return where a request goes: where it can be computed first; of equals to the one that holds its keys and values,
    then the first one named."""
    best = min(instances, key=lambda one: (one.ready_s, not one.holds))
    stays = best.holds or min(best.move_s, best.again_s) == 0.0
    return ChosenInstance(best.place, move=not stays and best.move_s <= best.again_s, again=best.again_s < best.move_s)


class Queued(NamedTuple):
    """A request in the queue of a ``block``: the ``order`` in which it came to the system, its ``new`` tokens there,
    the bytes that these need beside those it holds, and whether it was computed there before (``decodes``)."""

    number: int
    order: int
    block: int
    new: int
    num_bytes: float
    decodes: bool


class BlockBatch(NamedTuple):
    """The requests of a batch, and those that lose their keys and values at this place for it."""

    numbers: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()


def batched(
    queue: Sequence[Queued],
    holders: Mapping[int, tuple[int, float]],
    free_bytes: float,
    most: int,
    budget: int,
    spare_bytes: float = 0.0,
) -> BlockBatch:
    """Return the batch of a place whose `queue` is in order of coming: the block of the first one, at most so many
    requests and, behind the first of them, `budget` tokens. Next tokens come first, then prompts as far as there is
    room for their keys and values and `spare_bytes` beside. `holders` are those who have some there, as (order,
    bytes): where the next token of a request lacks room, the last of those who came behind it lose theirs; a prompt
    takes room from others only where it came before all of them, so that whoever came first always goes on."""
    lost: dict[int, None] = {}
    oldest = min((order for order, _ in holders.values()), default=0)
    for block in dict.fromkeys(one.block for one in queue):  # a block of which nobody fits does not stop the others
        taken: dict[int, None] = {}
        tokens = 0
        for one in sorted((q for q in queue if q.block == block), key=lambda q: (not q.decodes, q.order)):
            if one.number in lost or len(taken) == most or (taken and tokens + one.new > budget):
                continue
            spare = 0.0 if one.decodes or one.order <= oldest else spare_bytes
            if one.num_bytes + spare > free_bytes:
                if not (one.decodes or (one.order <= oldest and not taken)):
                    continue
                behind = [who for who in holders if holders[who][0] > one.order and who not in lost | taken]
                if free_bytes + sum(holders[who][1] for who in behind) < one.num_bytes:
                    continue
                behind.sort(key=lambda who: holders[who][0])
                while one.num_bytes > free_bytes:
                    lost[behind[-1]] = None
                    free_bytes += holders[behind.pop()][1]
            free_bytes -= one.num_bytes
            tokens += one.new
            taken[one.number] = None
        if taken:
            return BlockBatch(tuple(taken), tuple(lost))
    return BlockBatch((), tuple(lost))
