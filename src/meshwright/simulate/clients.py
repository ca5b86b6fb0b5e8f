"""Clients of a server on a virtual clock: a decider's rounds with predicted times of steps and messages.

A client's task is a message with the model, its steps one after the other, and a message with what changed. Messages
share the server's port, one after the other in each direction; a client with slow links holds it no longer than a fast
one, and its own message takes longer. The server merges on its own device, one version after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from math import ceil
from typing import Any, NamedTuple

import msgspec

from meshwright.sync.clients import (
    Answered,
    Ask,
    Begun,
    ClientDecision,
    ClientEvent,
    CutMask,
    Keep,
    Left,
    Merge,
    TrainOn,
    Turn,
    Wake,
    Woken,
)
from meshwright.sync.merged import MergedTasks
from meshwright.sync.pruning import Pruning
from meshwright.world.crowd import Crowd
from meshwright.world.decider import Decider, LogEntry

#: A job whose server makes so many decisions a step of a client does not get anywhere.
HOPELESS = 1000


class ClientSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of clients and their server: seconds of a step of each client, ``down_s`` and ``up_s`` of its messages and
    their bytes, and ``merge_s`` for each answer in a version. ``tree`` clients side by side send to an aggregator
    beside the first of them, in ``near_s``, and it sends one sum, as large as the model; 1: there are none. A step of
    more than one pass is longer by ``pass_s`` for each. With ``pruning`` the model has ``prunable`` values of
    ``element_bytes`` each. With tasks that are ``merged`` a step is one of a single head, and longer by ``head_s`` for
    each more; ``measure_s`` are the seconds of a client to measure affinities, ``head_bytes`` those of each head."""

    step_s: tuple[float, ...]
    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    down_bytes: int
    up_bytes: int
    pass_s: tuple[float, ...] = ()
    pruning: Pruning | None = None
    prunable: int = 0
    merged: MergedTasks | None = None
    head_s: tuple[float, ...] = ()
    measure_s: tuple[float, ...] = ()
    head_bytes: tuple[int, ...] = ()
    element_bytes: int = 4
    merge_s: float = 0.0
    tree: int = 1
    near_s: tuple[float, ...] = ()

    def down_of(self, said: TrainOn) -> int:
        """Return the bytes that go to a client for a task."""
        if self.merged is not None:
            return self.down_bytes - self._absent(said)
        if self.pruning is None:
            return self.down_bytes * (2 if said.directed else 1)
        others = self.down_bytes // self.element_bytes - self.prunable
        return self.pruning.sent(said.mask, said.told, self.prunable, others, self.element_bytes)

    def up_of(self, said: TrainOn) -> int:
        """Return the bytes that come from a client after a task."""
        if self.merged is None:
            return self.up_bytes
        return self.up_bytes - self._absent(said) + (self.merged.affinity_bytes if said.measured else 0)

    def _absent(self, said: TrainOn) -> int:
        """Bytes of heads that a task does not train."""
        return sum(self.head_bytes) - sum(self.head_bytes[task] for task in self.merged.heads(said.heads))

    def more_s(self, client: int, said: TrainOn) -> float:
        """Return the seconds that a step of a task takes besides one pass with one head, in the mean over its steps."""
        more = (said.passes - 1) * self.pass_s[client] if said.passes > 1 else 0.0
        if self.head_s:
            more += (len(self.merged.heads(said.heads)) - 1) * self.head_s[client]
            more += self.measure_s[client] / said.steps if said.measured else 0.0
        return more


class Version(NamedTuple):
    """A version of the model: when it was there, what of how many clients' steps went into it, and the mean number of
    versions that these were behind."""

    at_s: float
    answers: int
    steps: int
    staleness: float


class ClientRounds(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of clients and their server: the ``versions``, the steps that every client took and the seconds that it
    was at them, steps that went into no version, bytes that went to and from clients, tasks that were left, and the
    decider's log."""

    seconds: float
    versions: tuple[Version, ...]
    steps: tuple[int, ...]
    busy_s: tuple[float, ...]
    wasted: int
    down_bytes: int
    up_bytes: int
    left: int
    log: tuple[LogEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """The rounds as plain values, without the log."""
        out = {name: msgspec.to_builtins(getattr(self, name)) for name in self.__struct_fields__ if name != "log"}
        return out | {"merged": self.merged, "staleness": self.staleness, "busy": self.busy}

    @property
    def merged(self) -> int:
        """Steps that went into versions."""
        return sum(version.steps for version in self.versions)

    @property
    def staleness(self) -> float:
        """Versions that an answer was behind, in the mean."""
        answers = sum(version.answers for version in self.versions)
        return sum(v.staleness * v.answers for v in self.versions) / answers if answers else 0.0

    @property
    def busy(self) -> float:
        """The part of the time in which a client was at its steps, in the mean."""
        return sum(self.busy_s) / (len(self.busy_s) * self.seconds) if self.seconds else 0.0


class _Task(msgspec.Struct):
    """A client's task on the clock: ``begun_s`` is when its first step begins."""

    said: TrainOn
    version: int
    given_s: float
    begun_s: float
    step_s: float
    sent: bool = False
    leaves: bool = False

    def steps_at(self, at_s: float) -> int:
        """Whole steps done."""
        return min(self.said.steps, max(0, int((at_s - self.begun_s) / self.step_s + 1e-9)))


def simulate_clients(
    sizes: ClientSizes,
    decider: Decider[Any, ClientEvent, ClientDecision],
    world: Crowd,
    num_steps: int,
    num_versions: int | None = None,
) -> ClientRounds:
    """The rounds of a job until as many steps of clients went into versions, or there are so many versions."""
    return _Clock(sizes, decider, world, num_steps, num_versions).run()


class _Clock:
    """The virtual clock: the heap holds (when, number, what happens then)."""

    def __init__(
        self,
        sizes: ClientSizes,
        decider: Decider[Any, ClientEvent, ClientDecision],
        world: Crowd,
        num_steps: int,
        num_versions: int | None,
    ):
        self.sizes, self.decider, self.world = sizes, decider, world
        self.num_steps, self.num_versions = num_steps, num_versions
        clients = len(sizes.step_s)
        self.heap: list[tuple[float, int, Callable[[float], ClientEvent | None]]] = []
        self.order = count()
        self.now_s = self.down_free_s = self.up_free_s = self.server_free_s = 0.0
        self.tasks: dict[int, _Task] = {}
        self.free_s = [0.0] * clients  # when the step that a client cannot leave ends
        self.arrived: dict[tuple[int, int], tuple[int, int]] = {}  # (client, task) -> version, steps
        self.steps, self.busy_s = [0] * clients, [0.0] * clients
        # of aggregators: when the port of one is free, answers on their way to it, and those that it has
        self.near_free_s: dict[int, float] = {}
        self.coming: dict[tuple[int, int], int] = {}
        self.added: dict[tuple[int, int], list[tuple[int, _Task, int]]] = {}
        self.versions: list[Version] = []
        self.merged = 0
        self.bytes, self.left, self.log = [0, 0], 0, []

    @property
    def done(self) -> bool:
        """Whether all steps, or versions, that are asked for are merged."""
        return self.merged >= self.num_steps or len(self.versions) == self.num_versions

    def run(self) -> ClientRounds:
        state, limit = self.decider.begin(), HOPELESS * (self.num_steps + len(self.steps))
        event: ClientEvent = Begun()
        while limit and not self.done:
            limit -= 1
            state, decisions = self.decider.decide(state, event)
            self.log.append(LogEntry(event, decisions, self.now_s))
            for decision in decisions:
                if not self.done:
                    self._do(decision)
            if not self.heap:
                break
            event = event if self.done else self._next()
        for client, task in self.tasks.items():  # what is still being done
            self._count(client, task, self.now_s)
        return ClientRounds(
            seconds=max(self.now_s, self.versions[-1].at_s if self.versions else 0.0),
            versions=tuple(self.versions),
            steps=tuple(self.steps),
            busy_s=tuple(self.busy_s),
            wasted=sum(self.steps) - self.merged,
            down_bytes=self.bytes[0],
            up_bytes=self.bytes[1],
            left=self.left,
            log=tuple(self.log),
        )

    def _next(self) -> ClientEvent:
        """The next event that the decider is told."""
        while True:
            at_s, _, happens = heapq.heappop(self.heap)
            self.now_s = max(self.now_s, at_s)
            event = happens(self.now_s)
            if event is not None:
                return event
            if not self.heap:
                return Woken(-1, self.now_s)

    def _at(self, at_s: float, happens: Callable[[float], ClientEvent | None]) -> None:
        heapq.heappush(self.heap, (at_s, next(self.order), happens))

    def _do(self, decision: ClientDecision) -> None:
        match decision:
            case TrainOn():
                self._train(decision)
            case Ask(client=client):
                self._ask(client)
            case Merge():
                self._merge(decision)
            case CutMask():
                self.server_free_s = max(self.server_free_s, self.now_s) + self.sizes.merge_s
            case Turn():  # another model of those that the server holds
                pass
            case Keep(parts=parts):
                self.server_free_s = max(self.server_free_s, self.now_s) + self.sizes.merge_s * len(parts)
                for part in parts:
                    del self.arrived[part.client, part.task]
            case Wake(mark=mark, at_s=at_s):
                self._at(at_s, lambda now_s: Woken(mark, now_s))

    def _train(self, said: TrainOn) -> None:
        """The model goes to a client, which begins when it is there and its present step is over."""
        client, sizes = said.client, self.sizes
        before = self.tasks.pop(client, None)
        if before is not None:
            self._count(client, before, self.now_s)
        ready = max(self.now_s, self.server_free_s)
        starts = max(ready, self.down_free_s)
        num_bytes = sizes.down_of(said)
        down_s = sizes.down_s[client] * num_bytes / sizes.down_bytes
        self.down_free_s = starts + down_s
        here = starts + down_s * max(1.0, self.world.sending(client))
        self.bytes[0] += num_bytes
        step_s = (sizes.step_s[client] + sizes.more_s(client, said)) * self.world.slowdown(client, said.task)
        task = _Task(said, len(self.versions), self.now_s, max(here, self.free_s[client]), step_s)
        task.leaves = self.world.drops(client, said.task)
        self.tasks[client] = task
        ends = task.begun_s + said.steps * step_s
        if task.leaves or not said.hold:
            self._at(ends, lambda now_s: self._ends(client, task, now_s))

    def _ends(self, client: int, task: _Task, now_s: float) -> ClientEvent | None:
        if self.tasks.get(client) is not task or task.sent:
            return None
        return self._over(client, task, task.said.steps, now_s)

    def _over(self, client: int, task: _Task, steps: int, now_s: float) -> ClientEvent | None:
        """A client has done so many steps of its task: it sends what changed, or drops out."""
        self._count(client, task, now_s)
        del self.tasks[client]
        if task.leaves:
            self.left += 1
            if self.sizes.tree > 1:
                self._forward(client // self.sizes.tree * self.sizes.tree, task.said.task, now_s)
            return Left(client, task.said.task, now_s)
        return self._sent(client, task, steps, now_s)

    def _ask(self, client: int) -> None:
        """A client sends at the end of its present step, and at least one."""
        task = self.tasks.get(client)
        if task is None or task.sent:
            return
        done = max(1, min(task.said.steps, ceil((self.now_s - task.begun_s) / task.step_s - 1e-9)))

        def asked(now_s: float) -> ClientEvent | None:
            if self.tasks.get(client) is not task or task.sent:
                return None
            return self._over(client, task, done, now_s)

        self._at(max(self.now_s, task.begun_s + done * task.step_s), asked)

    def _sent(self, client: int, task: _Task, steps: int, now_s: float) -> None:
        """Send what changed to the server, or to the aggregator before it."""
        task.sent = True
        if self.sizes.tree > 1:
            return self._near(client, task, steps, now_s)
        num_bytes = self.sizes.up_of(task.said)
        up_s = self.sizes.up_s[client] * num_bytes / self.sizes.up_bytes
        own = up_s * max(1.0, self.world.sending(client))
        ends = max(now_s + own, max(self.up_free_s, now_s) + up_s)
        self.up_free_s = max(self.up_free_s, now_s) + up_s

        def arrives(now_s: float) -> ClientEvent:
            self.bytes[1] += num_bytes
            self.arrived[client, task.said.task] = task.version, steps
            return Answered(client, task.said.task, task.version, steps, task.given_s, now_s)

        self._at(ends, arrives)

    def _near(self, client: int, task: _Task, steps: int, now_s: float) -> None:
        """Send what changed to the aggregator, which sends the sum on when all of its clients' answers are there."""
        sizes, number = self.sizes, task.said.task
        leader = client // sizes.tree * sizes.tree
        starts = max(self.near_free_s.get(leader, 0.0), now_s)
        self.near_free_s[leader] = starts + sizes.near_s[client]
        ends = starts + sizes.near_s[client] * max(1.0, self.world.sending(client))
        self.coming[leader, number] = self.coming.get((leader, number), 0) + 1

        def arrives(now_s: float) -> None:
            self.coming[leader, number] -= 1
            self.added.setdefault((leader, number), []).append((client, task, steps))
            self._forward(leader, number, now_s)

        self._at(ends, arrives)

    def _forward(self, leader: int, number: int, now_s: float) -> None:
        """Send an aggregator's sum of a task, unless a client of it is still to answer."""
        group = range(leader, leader + self.sizes.tree)
        working = any(self.tasks[c].said.task == number for c in group if c in self.tasks)
        found = self.added.get((leader, number), [])
        if working or self.coming.get((leader, number)) or not found:
            return
        del self.added[leader, number]
        sizes, ready = self.sizes, now_s + self.sizes.merge_s * len(found)
        self.up_free_s = max(self.up_free_s, ready) + sizes.down_s[leader]
        self.bytes[1] += sizes.down_bytes

        def answered(client: int, task: _Task, steps: int) -> Callable[[float], ClientEvent]:
            def arrives(now_s: float) -> ClientEvent:
                self.arrived[client, number] = task.version, steps
                return Answered(client, number, task.version, steps, task.given_s, now_s)

            return arrives

        for client, task, steps in found:
            self._at(self.up_free_s, answered(client, task, steps))

    def _count(self, client: int, task: _Task, now_s: float) -> None:
        """Book a client's steps until now; the one that it is in, it ends."""
        if task.sent:
            return
        done = task.steps_at(now_s)
        if done < task.said.steps and now_s > task.begun_s + done * task.step_s + 1e-12:
            done += 1
        self.steps[client] += done
        self.busy_s[client] += max(0.0, min(now_s, task.begun_s + done * task.step_s) - task.begun_s)
        self.free_s[client] = task.begun_s + done * task.step_s if done else self.free_s[client]

    def _merge(self, decision: Merge) -> None:
        """The next version is there when the server has merged what arrived."""
        self.server_free_s = max(self.server_free_s, self.now_s) + self.sizes.merge_s * len(decision.parts)
        found = [self.arrived.pop((part.client, part.task)) for part in decision.parts]
        behind = sum(len(self.versions) - version for version, _ in found) / len(found)
        steps = decision.steps or sum(steps for _, steps in found)
        self.versions.append(Version(self.server_free_s, len(found), steps, behind))
        self.merged += steps
