"""Requests that go through chains of parts of a model, each part at a place with a queue of its own.

A place computes one batch at a time, of requests that need the same part. What a request has computed leaves keys and
values of that part there; behind the last part it has a token, and goes through the chain again for the next one. A
:class:`ChainWay` says where a request goes next and what a place computes; here is the clock, the memory and the costs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import count
from math import ceil
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from meshwright.serving.blockllm import BlockBatch, Queued
from meshwright.simulate.iterations import IterationCosts
from meshwright.simulate.served import GAP_EDGES, MOST_SAMPLES, SPENT, HostTimes, ServedRequests
from meshwright.spec.requests import Requests

_EDGES = GAP_EDGES.tolist()
_HOST, _IDLE, _MOVES = (SPENT.index(name) for name in ("host", "idle", "moves"))
#: Kinds of events: what comes at the same time as a batch ends is in the next one.
ARRIVES, COMES, LEAVES, ENDS = range(4)


class ChainPart(NamedTuple):
    """A part of a model: its ``name``, by which requests are batched, its ``share`` of the layers, the bytes of keys
    and values of a block of tokens, and whether answers come out of it (``last``)."""

    name: Hashable
    share: float
    block_bytes: float
    last: bool


class ChainPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A place: the costs of a whole model's iterations there, its host, and the bytes that keys and values may take."""

    costs: IterationCosts
    host: HostTimes
    room_bytes: float


class ChainHop(NamedTuple):
    """The way of a request to its next part: the place, the part, and the seconds that it and its cache are under way.
    ``again``: it begins its chain again instead, with all of its tokens."""

    place: int
    part: ChainPart
    delay_s: float = 0.0
    again: bool = False


class ChainVisit:
    """A request at a place: what it computes there, in which of its passes (``epoch``): ``new`` tokens behind ``past``
    ones that are there when the batch begins."""

    __slots__ = ("epoch", "new", "number", "part", "past")

    def __init__(self, number: int, epoch: int, part: ChainPart):
        self.number, self.epoch, self.part = number, epoch, part
        self.new = self.past = 0


class ChainWay(Protocol):
    """The decisions about chains."""

    def hop(self, chains: Chains, number: int) -> ChainHop:
        """Return the next hop of a request."""

    def batch(self, queue: Sequence[Queued], holders: dict[int, tuple[int, float]], free_bytes: float) -> BlockBatch:
        """Return what a place computes next."""

    def lost(self, chains: Chains, number: int) -> bool:
        """Note that a request lost keys and values somewhere; return whether it begins its chain again."""


class Chains:
    """The state of a simulation: where each request is in its chain (``at``), the tokens that it has (``target``), what
    it holds by (request, part) as (place, tokens, bytes), and the places' queues."""

    def __init__(self, places: Sequence[ChainPlace], requests: Requests, way: ChainWay, block: int):
        self.places, self.requests, self.way, self.block = places, requests, way, block
        n = len(requests)
        self.now, self.order = 0.0, count()
        self.prompt, self.output = requests.prompt.tolist(), requests.output.tolist()
        self.at, self.epoch, self.came = [0] * n, [0] * n, [0] * n
        self.place = [-1] * n
        self.target = list(self.prompt)
        self.generated, self.last = [0] * n, [-1.0] * n
        self.held: list[dict[Hashable, tuple[int, int, float]]] = [{} for _ in range(n)]
        self.holders: list[dict[int, tuple[int, float]]] = [{} for _ in places]
        self.free = [place.room_bytes for place in places]
        self.queue: list[dict[int, ChainVisit]] = [{} for _ in places]
        self.batch: list[list[ChainVisit]] = [[] for _ in places]
        self.computed: list[set[int]] = [set() for _ in places]  # those in the batches, by number
        self.until, self.recent = [0.0] * len(places), [dict[Hashable, float]() for _ in places]
        self.gone: set[int] = set()
        self.arrival = np.array(requests.arrival_s, np.float64)
        self.scheduled, self.first, self.end = (np.full(n, -1.0) for _ in range(3))
        self.evicted = np.zeros(n, np.int64)
        self.gaps, self.spent = [0] * len(GAP_EDGES), [0.0] * len(SPENT)
        self.seen = np.zeros(max(place.costs.most_tokens for place in places) + 1)
        self.batches = self.running = self.peak_batch = 0
        self.peak_bytes = self.used_bytes = 0.0
        self.samples: list[tuple[float, int, int, float]] = []
        self.open = 0
        self.following = min(requests.concurrency or n, n)
        after = requests.after.tolist() if len(requests.after) else [-1] * n
        self.next: dict[int, list[int]] = {}
        for i, before in enumerate(after):
            if before >= 0:
                self.next.setdefault(before, []).append(i)
        self.events: list[tuple] = []
        for i in range(self.following):
            if after[i] < 0:
                self.push(float(self.arrival[i]), ARRIVES, i)

    def push(self, at_s: float, kind: int, which: int, more: object = None) -> None:
        """Add an event: a request arrives, comes to a place, a place leaves, or the batch of a place ends."""
        heapq.heappush(self.events, (at_s, kind, next(self.order), which, more))

    def run(self) -> None:
        """Simulate until nothing is left to happen."""
        while self.events:
            self.now, kind, _, which, more = heapq.heappop(self.events)
            if kind == ARRIVES:
                self.arrival[which], self.came[which] = self.now, next(self.order)
                self.open += 1
                self.go(which)
            elif kind == COMES:
                place, visit = more
                if visit.epoch == self.epoch[which]:
                    self._come(place, visit)
            elif kind == LEAVES:
                self._leave(which)
            elif which not in self.gone:
                self._ended(which)

    def go(self, number: int) -> None:
        """Send a request to the next part of its chain."""
        hop = self.way.hop(self, number)
        if hop.again:
            self.restart(number)
            hop = self.way.hop(self, number)
        place, tokens, _ = self.held[number].get(hop.part.name, (-1, 0, 0.0))
        if place >= 0 and place != hop.place:  # moved there
            self._drop(number, hop.part.name)
            blocks = self._bytes(hop.part, tokens)
            self.held[number][hop.part.name] = (hop.place, tokens, blocks)
            self._account(number, hop.place, blocks)
        self.place[number] = hop.place
        visit = ChainVisit(number, self.epoch[number], hop.part)
        self.push(self.now + hop.delay_s, COMES, number, (hop.place, visit))

    def restart(self, number: int) -> None:
        """Let a request begin its chain again, with what it has generated as a part of its prompt."""
        for name in list(self.held[number]):
            self._drop(number, name)
        self.epoch[number] += 1
        self.at[number] = 0
        self.evicted[number] += 1

    def wait_s(self, place: int) -> float:
        """Return the seconds until a place is through with what it computes and one batch of each part that waits."""
        recent = self.recent[place]
        names = {visit.part.name for visit in self.queue[place].values()}
        return max(0.0, self.until[place] - self.now) + sum(recent.get(name, 0.0) for name in names)

    def _come(self, place: int, visit: ChainVisit) -> None:
        if place in self.gone:
            self.go(visit.number)
            return
        self.queue[place][visit.number] = visit
        if not self.batch[place]:
            self._start(place)

    def _bytes(self, part: ChainPart, tokens: int) -> float:
        return -(-tokens // self.block) * part.block_bytes

    def _account(self, number: int, place: int, num_bytes: float) -> None:
        """Give or take bytes of a place to a request."""
        self.free[place] -= num_bytes
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        total = self.holders[place].get(number, (0, 0.0))[1] + num_bytes
        if total > 1e-6:
            self.holders[place][number] = self.came[number], total
        else:
            self.holders[place].pop(number, None)

    def _drop(self, number: int, name: Hashable) -> None:
        place, _, size = self.held[number].pop(name)
        self._account(number, place, -size)

    def _evict(self, number: int, place: int) -> None:
        """Take all that a request holds at a place; it begins again, or what it needs there is computed again."""
        for name, (where, _, _) in list(self.held[number].items()):
            if where == place:
                self._drop(number, name)
        if self.way.lost(self, number):
            self.restart(number)
            for queue in self.queue:
                queue.pop(number, None)
            self.go(number)

    def _start(self, place: int) -> None:
        """Let a place compute a batch, if anybody fits."""
        queue = self.queue[place]
        if not queue:
            return
        said = [self._queued(visit) for visit in queue.values()]
        computed, at = self.computed, self.place
        holders = {who: kept for who, kept in self.holders[place].items() if who not in computed[at[who]]}
        found = self.way.batch(said, holders, self.free[place])
        for number in found.evicted:
            self._evict(number, place)
        if not found.numbers:
            return
        visits = [queue.pop(number) for number in found.numbers]
        for visit in visits:
            number, part = visit.number, visit.part
            if self.scheduled[number] < 0:
                self.scheduled[number] = self.now
                self.running += 1
            was = self.held[number].get(part.name, (place, 0, 0.0))[2]
            size = self._bytes(part, visit.past + visit.new)
            self.held[number][part.name] = place, visit.past + visit.new, size
            self._account(number, place, size - was)
        seconds = self._seconds(place, visits)
        self.batch[place], computed[place] = visits, set(found.numbers)
        self.until[place] = self.now + seconds
        self.recent[place][visits[0].part.name] = seconds
        self.batches += 1
        self.peak_batch = max(self.peak_batch, len(visits))
        self.samples.append((self.now, self.running, self.open - self.running, self.used_bytes))
        if len(self.samples) > 2 * MOST_SAMPLES:
            del self.samples[1::2]
        self.push(self.until[place], ENDS, place)

    def _queued(self, visit: ChainVisit) -> Queued:
        _, visit.past, held = self.held[visit.number].get(visit.part.name, (0, 0, 0.0))
        visit.new = self.target[visit.number] - visit.past
        more = self._bytes(visit.part, visit.past + visit.new) - held
        name, order = visit.part.name, self.came[visit.number]
        return Queued(visit.number, order, name, visit.new, more, visit.past > 0)

    def _seconds(self, place: int, visits: Sequence[ChainVisit]) -> float:
        """Return what a batch takes of the part that it is of, and count where the time goes."""
        costs, host, part = self.places[place].costs, self.places[place].host, visits[0].part
        decoding = [visit.past + 1 for visit in visits if visit.new == 1 and visit.past]
        prompts = [visit for visit in visits if visit.new != 1 or not visit.past]
        tokens, most = sum(visit.new for visit in visits), costs.most_tokens
        linear = costs.linear_s.item(min(tokens, most)) * max(1.0, tokens / most) * part.share
        sampled = costs.sampled_s.item(min(len(visits), len(costs.sampled_s) - 1)) if part.last else 0.0
        decode = costs.decoding(len(decoding), sum(decoding) / len(decoding)) * part.share if decoding else 0.0
        prefill = 0.0
        if prompts:
            new, past = (sum(getattr(v, name) for v in prompts) / len(prompts) for name in ("new", "past"))
            prefill = costs.prefilling(len(prompts), new, past) * part.share
        device = linear + sampled + decode + prefill
        eager = host.eager_s * part.share if prompts or tokens > host.graph_tokens else 0.0
        added = host.step_s + host.request_s * len(visits) + max(0.0, eager - device)
        for i, seconds in enumerate((linear, sampled, decode, prefill, added)):
            self.spent[i] += seconds
        self.seen[min(tokens, most)] += part.share
        return device + added

    def _ended(self, place: int) -> None:
        """Let the requests of a batch go on."""
        visits, self.batch[place], self.computed[place] = self.batch[place], [], set()
        for visit in visits:
            number = visit.number
            if visit.epoch != self.epoch[number]:
                continue
            self.at[number] += 1
            if visit.part.last:
                self._token(number)
            if self.generated[number] < self.output[number]:
                self.go(number)
        if not self.batch[place]:
            self._start(place)

    def _token(self, number: int) -> None:
        """Note that a token is generated; whoever waits for the end of an answer comes behind its last one."""
        self.at[number] = 0
        self.generated[number] += 1
        self.target[number] += 1
        if self.generated[number] == 1:
            self.first[number] = self.now
        else:
            self.gaps[max(bisect_right(_EDGES, self.now - self.last[number]) - 1, 0)] += 1
        self.last[number] = self.now
        if self.generated[number] < self.output[number]:
            return
        self.end[number] = self.now
        self.open -= 1
        self.running -= 1
        waiting = {place for place, _, _ in self.held[number].values()}
        for name in list(self.held[number]):
            self._drop(number, name)
        for later in self.next.pop(number, ()):
            self.push(self.now + max(0.0, float(self.requests.arrival_s[later])), ARRIVES, later)
        if self.following < len(self.requests):
            self.push(self.now, ARRIVES, self.following)
            self.following += 1
        for place in waiting:  # whoever lacked room there may have it now
            if not self.batch[place] and self.queue[place] and place not in self.gone:
                self._start(place)

    def _leave(self, place: int) -> None:
        """Let a place go with all that lies there; its batch is lost, and who waits there goes elsewhere."""
        self.gone.add(place)
        there = [visit.number for visit in (*self.batch[place], *self.queue[place].values())]
        self.batch[place], self.computed[place], self.queue[place] = [], set(), {}
        for number in list(self.holders[place]):
            for name, (where, _, _) in list(self.held[number].items()):
                if where == place:
                    self._drop(number, name)
            self.evicted[number] += 1
        for number in dict.fromkeys(there):
            self.epoch[number] += 1
            self.go(number)

    def served(self, blocks: float) -> ServedRequests:
        """Return the records of all requests; a block of the cache is so many bytes."""
        span = float(self.end.max() - self.arrival.min())
        spent = np.array(self.spent)
        spent[_IDLE] = max(0.0, span * len(self.places) - spent.sum())
        sample = np.array(self.samples[:: max(1, ceil(len(self.samples) / MOST_SAMPLES))]).reshape(-1, 4)
        sample[:, 3] /= blocks or 1.0
        return ServedRequests(
            arrival_s=self.arrival,
            scheduled_s=self.scheduled,
            first_s=self.first,
            end_s=self.end,
            evicted=self.evicted,
            gaps=np.array(self.gaps),
            spent_s=spent,
            tokens_seen=self.seen,
            iterations=self.batches,
            runs=self.batches,
            evictions=int(self.evicted.sum()),
            peak_blocks=ceil(self.peak_bytes / blocks) if blocks else 0,
            peak_batch=self.peak_batch,
            sample_s=sample[:, 0],
            sample=sample[:, 1:].astype(np.int64),
            cached=np.zeros(len(self.requests), np.int64),
        )
