"""Buckets of edges onto machines: which of the P x P pairs of partitions is trained where and when.

Nodes are cut into P partitions, so that the edges from one to another are a bucket, and a bucket needs its two
partitions alone. Two machines train at a time where their buckets have no partition in common. A *lock server* hands
them out, those first that share a partition with what the machine has (PyTorch-BigGraph, Lerer et al., 2019, arXiv
1903.12287). On a *grid* of heads by tails, n machines train a diagonal, whose blocks are orthogonal, in an episode, and
the next diagonal in the next one (GraphVite, Zhu et al., 2019, arXiv 1903.00757).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class EdgeBucket(NamedTuple):
    """The edges from a node of partition ``head`` to one of partition ``tail``."""

    head: int
    tail: int


#: What every machine trains at the same time; None: nothing is left for it that others do not hold.
Round = tuple[EdgeBucket | None, ...]


@lru_cache(maxsize=1 << 16)
def needed(bucket: EdgeBucket, partitions: int, apart: bool) -> frozenset[int]:
    """Return the numbers of what a bucket needs: its partitions, or, where heads and tails are `apart` in two tables,
    the head's partition of the first and the tail's of the second, numbered behind those."""
    return frozenset((bucket.head, bucket.tail + partitions * apart))


def inside_out(partitions: int, apart: bool = False) -> tuple[EdgeBucket, ...]:
    """Return all buckets in an order that loads a partition as seldom as any order can into room for two.

    Layer l is all buckets whose smaller partition is l, from the last layer to the first. In one table every pair of
    partitions has to meet, and one that is loaded meets one other, so that P (P - 1) / 2 + 1 loads are the least. Each
    layer begins with a pair that has the partition before it, and its diagonal follows one that was trained, so that
    all vectors are in one space. In two tables it is a snake through the grid: P^2 + 1 loads."""
    if apart:
        rows = ((head, range(partitions)[:: -1 if head % 2 else 1]) for head in range(partitions))
        return tuple(EdgeBucket(head, tail) for head, tails in rows for tail in tails)
    out = []
    for layer in range(partitions - 1, -1, -1):
        for other in range(layer + 1, partitions):
            out += [EdgeBucket(layer, other), EdgeBucket(other, layer)]
            if other == layer + 1:
                out.append(EdgeBucket(layer, layer))
            if other == layer + 1 == partitions - 1:
                out.append(EdgeBucket(other, other))
    return tuple(out) if partitions > 1 else (EdgeBucket(0, 0),)


def loads(order: Iterable[EdgeBucket], partitions: int, apart: bool = False) -> int:
    """Return how many partitions one machine loads that keeps those of the bucket it trained last."""
    held: frozenset[int] = frozenset()
    count = 0
    for bucket in order:
        wanted = needed(bucket, partitions, apart)
        count += len(wanted - held)
        held = wanted if len(wanted) > 1 else wanted | frozenset(sorted(held - wanted)[:1])  # a diagonal leaves room
    return count


class LockServer:
    """Hands buckets to machines, none whose partition another machine holds; knows no clock and no network."""

    def __init__(self, partitions: int, apart: bool = False):
        self.partitions, self.apart = partitions, apart
        self.locked: dict[int, int] = {}  # what is needed -> the machine that holds it
        self._order = inside_out(partitions, apart)
        # [buckets, 2]: what each bucket needs, in the order of :func:`inside_out`; a diagonal of one table twice
        self._needs = np.array([(b.head, b.tail + partitions * apart) for b in self._order])
        self._taken = np.zeros(2 * partitions, bool)  # what is locked
        self._open = np.arange(len(self._order))  # places of the buckets that are left

    @property
    def waiting(self) -> int:
        """The number of buckets that nobody has been handed yet."""
        return len(self._open)

    @property
    def left(self) -> list[EdgeBucket]:
        """Buckets that nobody has been handed yet."""
        return [self._order[place] for place in self._open.tolist()]

    def acquire(self, machine: int, before: EdgeBucket | None = None) -> EdgeBucket | None:
        """Lock and return the bucket that has most in common with the one `before`, the first of these in the order of
        :func:`inside_out`; None where all that are left need what another machine holds."""
        if not len(self._open):
            return None
        heads, tails = self._needs[self._open].T
        held = np.zeros(2 * self.partitions, int)
        if before is not None:
            held[list(needed(before, self.partitions, self.apart))] = 1
        common = held[heads] + np.where(heads == tails, 0, held[tails])
        common[self._taken[heads] | self._taken[tails]] = -1
        at = int(common.argmax())
        if common[at] < 0:
            return None
        best = self._order[self._open[at]]
        self._open = np.delete(self._open, at)
        wanted = needed(best, self.partitions, self.apart)
        self._taken[list(wanted)] = True
        self.locked |= dict.fromkeys(wanted, machine)
        return best

    def release(self, bucket: EdgeBucket) -> None:
        """Unlock the partitions of a bucket that is trained."""
        for one in needed(bucket, self.partitions, self.apart):
            del self.locked[one]
            self._taken[one] = False


@lru_cache(maxsize=32)
def locked(partitions: int, machines: int, apart: bool = False) -> tuple[Round, ...]:
    """Return what machines train that ask a lock server, where all buckets take equally long."""
    if machines == 1:
        return tuple((bucket,) for bucket in inside_out(partitions, apart))
    server, before = LockServer(partitions, apart), [None] * machines
    out: list[Round] = []
    while server.waiting:
        now = [server.acquire(machine, before[machine]) for machine in range(machines)]
        for machine, bucket in enumerate(now):
            if bucket is not None:
                server.release(bucket)
                before[machine] = bucket
        out.append(tuple(now))
    return tuple(out)


def grid(partitions: int, machines: int) -> tuple[Round, ...]:
    """Return the episodes of a grid of heads by tails that is cut into squares of as many partitions as there are
    machines: the diagonals of each square, on which every machine keeps its tails and heads go round.

    Raises:
        ValueError: partitions that machines do not divide.
    """
    if partitions % machines:
        raise ValueError(f"{machines} machines do not divide {partitions} partitions")
    steps = range(0, partitions, machines)
    return tuple(
        tuple(EdgeBucket(x + (machine + turn) % machines, y + machine) for machine in range(machines))
        for x in steps
        for y in steps
        for turn in range(machines)
    )


@lru_cache(maxsize=32)
def tournament(partitions: int, machines: int) -> tuple[Round, ...]:
    """Return rounds of one table in which every machine has a bucket: pairs of partitions meet as players do in a
    tournament of P - 1 days (Kirkman's circle: one stays, the others go round), so that those of a day have none in
    common; a pair trains both directions, and both diagonals on the first day. Of the pairs of a day each machine takes
    one that it has a partition of, where there is one.

    Raises:
        ValueError: partitions of which twice the machines are no divisor.
    """
    if partitions % (2 * machines):
        raise ValueError(f"{machines} machines do not share {partitions // 2} pairs of {partitions} partitions")
    held: list[set[int]] = [set() for _ in range(machines)]
    out: list[Round] = []
    for day in range(partitions - 1):
        circle = [(day + turn) % (partitions - 1) for turn in range(partitions - 1)]
        players = [partitions - 1, *circle]
        pairs = [{players[i], players[-1 - i]} for i in range(partitions // 2)]
        while pairs:
            chosen: list[set[int] | None] = [None] * machines
            for machine in sorted(range(machines), key=lambda m: -max(len(held[m] & pair) for pair in pairs)):
                chosen[machine] = max(pairs, key=lambda pair, m=machine: len(held[m] & pair))
                pairs.remove(chosen[machine])
            held = [set(pair) for pair in chosen if pair is not None]
            ends = [tuple(sorted(pair)) for pair in held]
            out.append(tuple(EdgeBucket(i, j) for i, j in ends))
            out.append(tuple(EdgeBucket(j, i) for i, j in ends))
            if not day:
                out.append(tuple(EdgeBucket(i, i) for i, _ in ends))
                out.append(tuple(EdgeBucket(j, j) for _, j in ends))
    return tuple(out)


def orthogonal(rounds: Sequence[Round], partitions: int, apart: bool) -> bool:
    """Return whether no two machines hold the same in any round."""
    for one in rounds:
        wanted = [item for b in one if b is not None for item in needed(b, partitions, apart)]
        if len(wanted) != len(set(wanted)):
            return False
    return True


class Stay(NamedTuple):
    """A bucket that a machine trains in a round: what it ``loads`` before and ``stores`` behind it."""

    round: int
    bucket: EdgeBucket
    loads: tuple[int, ...]
    stores: tuple[int, ...]


def stays(rounds: Sequence[Round], partitions: int, apart: bool) -> tuple[tuple[Stay, ...], ...]:
    """Return what every machine trains, loads and stores. It keeps what its next bucket needs, where that is in the
    next round: else another one may train it meanwhile. One machine alone keeps what its last bucket needed, as long as
    that has room for two. Behind the last round all is stored."""
    alone = len(rounds[0]) == 1
    out = []
    for machine in range(len(rounds[0])):
        held: frozenset[int] = frozenset()
        mine: list[Stay] = []
        for number, one in enumerate(rounds):
            bucket = one[machine]
            if bucket is None:
                continue
            wanted = needed(bucket, partitions, apart)
            loaded = wanted - held
            held = held | wanted
            after = rounds[number + 1][machine] if number + 1 < len(rounds) else None
            following = needed(after, partitions, apart) if after is not None else frozenset()
            kept = held & following
            if alone and after is not None:
                kept |= frozenset(sorted(held - following)[: 2 - len(following)])
            mine.append(Stay(number, bucket, tuple(sorted(loaded)), tuple(sorted(held - kept))))
            held = kept
        out.append(tuple(mine))
    return tuple(out)


def moved(machines: Sequence[Sequence[Stay]], first: int = 0, *, peers: bool = False) -> int:
    """Return how many partitions all machines load and store from round `first` on; those that `peers` keep (number r
    and every so many further) are not moved by the machine that has them."""
    count = len(machines)
    return sum(
        not (peers and item % count == machine)
        for machine, mine in enumerate(machines)
        for stay in mine
        if stay.round >= first
        for item in (*stay.loads, *stay.stores)
    )
