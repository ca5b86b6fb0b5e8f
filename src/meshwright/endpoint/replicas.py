"""Replicas: several engines behind one front, to which the routing deciders of :mod:`meshwright.serving` send requests.

Each replica is held by whoever holds a single engine, and is started, watched and replaced by itself: while one is gone
the others go on, and its requests go on at them. A router sees of a replica what the front knows: the requests that it
was sent and that are not over, and which prefixes it was sent last.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import msgspec

from meshwright.endpoint.figures import SUMS
from meshwright.endpoint.front import Front
from meshwright.endpoint.prefixes import chain, decidable
from meshwright.endpoint.seam import EngineFacts, EngineFigures, Generated, Prompted
from meshwright.serving.engine_request import NewRequest
from meshwright.serving.routing import Router, opened


class RoutedReplica:
    """One replica as its holder sees the front, and as the router sees it (:class:`ReplicaLoad`): the requests that it
    has, by number, with their tokens (``sent``), and the prefixes that it was sent last."""

    def __init__(self, group: ReplicatedEngine, place: int):
        self._group, self.place = group, place
        self.ready = False
        self.dead = ""
        self.facts: EngineFacts | None = None
        self.figures = EngineFigures()
        self.sent: dict[int, int] = {}
        self._known: OrderedDict[int, None] = OrderedDict()

    # what a router looks at

    @property
    def open(self) -> int:
        """Requests that it was sent and that are not over."""
        return len(self.sent)

    @property
    def running(self) -> int:
        """Requests that run, as it said last."""
        return min(self.figures.running, self.open)

    @property
    def waiting(self) -> int:
        """Requests that do not."""
        return self.open - self.running

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers that those have or wait with."""
        return sum(self.sent.values())

    def cached(self, hashes: tuple[int, ...]) -> int:
        """Return how many blocks of a prefix it was sent lately."""
        return next((place for place, one in enumerate(hashes) if one not in self._known), len(hashes))

    def told(self, one: Prompted, hashes: tuple[int, ...]) -> None:
        """Take note of a request that it is sent: of as many blocks as its cache has."""
        self.sent[one.number] = len(one.prompt) + one.limit
        for name in hashes:
            self._known[name] = None
            self._known.move_to_end(name)
        most = self.facts.room // self.facts.block if self.facts is not None else 0
        while len(self._known) > most:
            self._known.popitem(last=False)

    # what its holder tells the front

    @property
    def under_way(self) -> int:
        """Requests that are not finished."""
        return len(self.sent)

    def built(self, facts: EngineFacts) -> None:
        """An engine is there."""
        self.ready, self.facts = True, facts
        self._group.built()

    def arrived(self, pieces: list[Generated], figures: EngineFigures | None) -> None:
        """The engine's process reports an iteration."""
        for piece in pieces:
            if piece.finish:
                self.sent.pop(piece.number, None)
        if figures is not None:
            self.figures = figures
        self._group.arrived(pieces, figures is not None)

    def lost(self) -> None:
        """The engine's process died, and another is on its way."""
        numbers, self.ready = tuple(self.sent), False
        self.sent.clear()
        self._known.clear()
        before, self.figures = self.figures, EngineFigures(blocks=self.figures.blocks)
        self._group.lost(numbers, before)

    def die(self, why: str) -> None:
        """No engine can be had any more."""
        self.ready, self.dead = False, why
        self._group.died()


class ReplicatedEngine:
    """The replicas of a front (:class:`~meshwright.endpoint.app.EngineHolder`), each with a holder of its own;
    ``unit`` tokens of a prompt have a name (0: prompts share nothing)."""

    def __init__(self, holders: Sequence[Any], router: Router, *, unit: int = 0, say: Callable[[str], None] = print):
        self.holders, self.router, self.unit, self._say = holders, opened(router), unit, say
        self.replicas = [RoutedReplica(self, place) for place in range(len(holders))]
        self._front: Front | None = None
        self._gone = dict.fromkeys(SUMS, 0)  # sums of engines that died
        self._names: dict[str, int] = {}

    async def open(self, front: Front) -> None:
        """Start all engines at once, and return once they are built.

        Raises:
            MeshwrightError: one of them cannot be built, as its holder says.
        """
        self._front = front
        some = await asyncio.gather(
            *(holder.open(replica) for holder, replica in zip(self.holders, self.replicas)), return_exceptions=True
        )
        if wrong := next((one for one in some if isinstance(one, BaseException)), None):
            await self.close(0.0)
            raise wrong

    async def close(self, grace_s: float = 5.0) -> None:
        """End all engines."""
        await asyncio.gather(*(holder.close(grace_s) for holder in self.holders))

    def order(self, asked: tuple[Prompted, ...] = (), cancelled: tuple[int, ...] = ()) -> None:
        """Send requests to the replicas that the router chooses, and cancellations to where requests are."""
        for replica, holder in zip(self.replicas, self.holders):
            if mine := tuple(number for number in cancelled if replica.sent.pop(number, None) is not None):
                holder.order((), mine)
        some: dict[int, list[Prompted]] = {}
        for one in asked:
            ready = [replica for replica in self.replicas if replica.ready]
            hashes = chain(one.prompt, self.unit, one.adapter) if self.unit else ()
            chosen = ready[self.router.choose(self._said(one, hashes), ready) if len(ready) > 1 else 0]
            chosen.told(one, hashes)
            some.setdefault(chosen.place, []).append(one)
        for place, mine in some.items():
            self.holders[place].order(tuple(mine))

    def _said(self, one: Prompted, hashes: tuple[int, ...]) -> NewRequest:
        adapter = self._names.setdefault(one.adapter, len(self._names)) if one.adapter else -1
        return decidable(one, adapter, hashes)

    # what replicas tell

    def built(self) -> None:
        """A replica has an engine: where there was none, what waits goes to it."""
        front, known = self._front, [one.facts for one in self.replicas if one.facts is not None]
        assert front is not None
        facts = msgspec.structs.replace(known[0], room=min(one.room for one in known))
        if not front.ready and (front.facts is not None or len(known) == len(self.replicas)):
            front.built(facts)  # at the start once all are there

    def arrived(self, pieces: list[Generated], news: bool) -> None:
        """A replica reports an iteration; its figures are told with those of the others."""
        assert self._front is not None
        self._front.arrived(pieces, self._together() if news else None)

    def lost(self, numbers: tuple[int, ...], figures: EngineFigures) -> None:
        """The engine of a replica died: its requests go on at others."""
        for name in SUMS:
            self._gone[name] += getattr(figures, name)
        assert self._front is not None
        if self._front.facts is None:
            return  # one of those that are built at the start
        self._front.lost(numbers, goes_on=any(one.ready for one in self.replicas))
        self._front.figures.reported(self._together())

    def died(self) -> None:
        """A replica can have no engine any more; the front can have none where all are so."""
        assert self._front is not None
        left = [one for one in self.replicas if not one.dead]
        self._say(f"{len(left)} of {len(self.replicas)} replicas are left")
        if not left:
            self._front.die(self.replicas[-1].dead)

    def _together(self) -> EngineFigures:
        """The figures of all replicas as those of one engine."""
        some = [one.figures for one in self.replicas]
        sums = {name: sum(getattr(one, name) for one in some) for name in EngineFigures.__struct_fields__}
        for name in SUMS:
            sums[name] += self._gone[name]
        compared = sum(one.compared * one.score_distance**2 for one in some)
        distance = sqrt(compared / sums["compared"]) if sums["compared"] else 0.0
        return EngineFigures(**(sums | {"score_distance": distance}))
