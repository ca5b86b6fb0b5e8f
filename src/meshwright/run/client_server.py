"""The server of clients: it does what a decider of ``sync/clients`` says, on a real clock, with model and mail."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import Any, NamedTuple

import torch

from meshwright.run import launch
from meshwright.run.client_saving import ServerSaver
from meshwright.run.flat import Flat
from meshwright.run.mail import (
    ANCHOR,
    ASK,
    CHANGED,
    DIRECTION,
    EXPECT,
    GO_ON,
    LEFT,
    NEAR,
    SAVE,
    SAVED,
    STOP,
    SUMMED,
    TRAIN,
    Gone,
    Letter,
    Post,
)
from meshwright.run.merged_tasks import JobModels
from meshwright.run.metrics import Metrics
from meshwright.run.pruned import PrunedModel
from meshwright.simulate.clients import Version
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
from meshwright.world.decider import Decider, LogEntry


class Given(NamedTuple):
    """A task as the server gave it: its number, the version and the values that it began with, and when."""

    task: int
    version: int
    start: torch.Tensor
    at_s: float


class ServerLoop:
    """The server: a decider, the model, and mail. ``run`` returns when so many steps of clients are merged, or when the
    run is asked to end."""

    def __init__(
        self,
        decider: Decider[Any, ClientEvent, ClientDecision],
        flat: Flat,
        down: list[Post],
        inbox: SimpleQueue[Letter | Gone],
        num_steps: int,
    ):
        self.decider, self.flat, self.down, self.inbox = decider, flat, down, inbox
        self.num_steps = num_steps
        self.metrics: Metrics | None = None
        self.model = flat.values()
        self.given: dict[int, Given] = {}
        #: The mask of the model, where it is pruned.
        self.pruned: PrunedModel | None = None
        #: The models of jobs, where tasks are merged and split.
        self.jobs: JobModels | None = None
        #: The gradient that each client sent last as an anchor.
        self.kept: dict[int, torch.Tensor] = {}
        self.arrived: dict[tuple[int, int], tuple[Letter, Given]] = {}
        self.wakes: list[tuple[float, int]] = []
        self.near: dict[int, list[Letter]] = defaultdict(list)
        self.events: deque[ClientEvent] = deque()
        self.unread: deque[Letter] = deque()
        self.expect: dict[int, Post] = {}
        self.tree = 1
        self.versions: list[Version] = []
        self.losses: list[float] = []
        self.merged = self.left = self.down_bytes = self.up_bytes = 0
        self.steps: dict[int, int] = defaultdict(int)
        self.sent_s: list[float] = []
        self.log: list[LogEntry] = []
        self.wrong: BaseException | None = None
        self.begun_s = time.perf_counter()
        #: The decider's state, and decisions of its last answer that are still to be done.
        self.state: Any = decider.begin()
        self.pending: tuple[ClientDecision, ...] = ()
        #: Clients whose tasks are not answered.
        self.working: set[int] = set()
        #: Versions and merged steps of a run that this one goes on with, and its seconds.
        self.first = self.merged_before = 0
        self.resumed_s = -1.0
        self.saver: ServerSaver | None = None

    def now_s(self) -> float:
        """Seconds since the server began."""
        return time.perf_counter() - self.begun_s

    def run(self) -> None:
        """Serve until the end, and say so to all clients, also where something is wrong."""
        try:
            self._serve()
            self._save_last()
        except BaseException as error:
            self.wrong = error
        finally:
            for client, channel in enumerate(self.down):
                channel.send(Letter(STOP, client))
        try:
            self._await_saved()
        except BaseException as error:
            self.wrong = self.wrong or error

    def _serve(self) -> None:
        """Do what the decider says from where it stands."""
        if self.merged >= self.num_steps:
            return
        if self.resumed_s < 0:
            self._decide(Begun(0.0))
        else:
            self._go_on()
        while True:
            while self.pending:
                decision, *rest = self.pending
                self.do(decision)
                self.pending = tuple(rest)
                if self.merged >= self.num_steps or launch.stop.requested:
                    return
            if self.saver is not None and self._settled() and self.saver.due(self.step):
                self._save()
            self._decide(self._next())

    def _decide(self, event: ClientEvent) -> None:
        """Have the decider decide what is to be done next."""
        self.state, self.pending = self.decider.decide(self.state, event)
        self.log.append(LogEntry(event, self.pending, self.now_s()))
        self._announce((d.client, d.task) for d in self.pending if isinstance(d, TrainOn))

    def _go_on(self) -> None:
        """Have clients go on with their tasks, or send their answers once more."""
        given = [(client, self.given[client].task) for client in sorted(self.working)]
        self._announce([*given, *((d.client, d.task) for d in self.pending if isinstance(d, TrainOn))])
        for client, task in given:
            self.down[client].send(Letter(GO_ON, client, task))

    def _announce(self, tasks: Iterable[tuple[int, int]]) -> None:
        """Tell aggregators for how many answers of clients' tasks to wait."""
        counts = Counter((client // self.tree * self.tree, task) for client, task in tasks)
        for (leader, task), members in counts.items() if self.expect else ():
            self.expect[leader].send(Letter(EXPECT, leader, task, members))

    @property
    def step(self) -> int:
        """The steps of each client, of those that are merged."""
        return self.merged // len(self.down)

    def _settled(self) -> bool:
        """Whether no part of a sum is on its way."""
        return not self.events and not any(self.near.values())

    def _save(self) -> None:
        """Note where all stands, and have every client do so."""
        number = self.saver.begin(self, self.step)
        for client, channel in enumerate(self.down):
            channel.send(Letter(SAVE, client, number))

    def _save_last(self) -> None:
        """Save where a run ends that has done something, once what is under way is on the disk."""
        if self.saver is None or not self.log:
            return
        self._await_saved()
        while not self._settled():  # asked to end between the parts of a sum
            before = self.pending
            self._decide(self._next())
            self.pending = (*before, *self.pending)
        self._save()

    def _await_saved(self) -> None:
        """Wait for the checkpoint under way, if there is one."""
        while self.saver is not None and self.saver.stands is not None:
            if self.saver.committing is not None:
                self.saver.poll(wait=True)
                continue
            letter = self.inbox.get()
            if isinstance(letter, Gone):
                raise letter.cause
            if letter.kind == SAVED:
                self.saver.take(letter)
            else:
                self.unread.append(letter)

    def do(self, decision: ClientDecision) -> None:
        """Carry a decision out."""
        match decision:
            case TrainOn(client=client, task=task):
                self.given[client] = Given(task, self.first + len(self.versions), self.model, self.now_s())
                self.working.add(client)
                if decision.directed:
                    self._send(Letter(DIRECTION, client, task, body=self.flat.as_bytes(self._direction())))
                body = self.flat.as_bytes(self.model)
                if self.pruned is not None:
                    body = self.pruned.body(self.model, task, decision.told)
                if self.jobs is not None:
                    body = self.jobs.values.body(self.model, decision.heads)
                if decision.anchor:
                    self._send(Letter(ANCHOR, client, task, decision.passes, body=body))
                else:
                    said = Letter(TRAIN, client, task, decision.steps, float(decision.hold), decision.heads, body)
                    self._send(said)
            case Ask(client=client):
                self.down[client].send(Letter(ASK, client, self.given[client].task))
            case Merge():
                self._merge(decision)
            case Turn(job=job, tasks=tasks):
                self.model = self.jobs.turn(self.model, job, tasks)
            case CutMask(number=number):
                self.model = self.pruned.cut(self.model, number)
            case Keep(parts=parts):
                for part in parts:
                    letter, _ = self.arrived.pop((part.client, part.task))
                    self.kept[part.client] = self.flat.decoded(letter.body, part.client, part.task)
            case Wake(mark=mark, at_s=at_s):
                self.wakes = sorted([*self.wakes, (at_s, mark)])

    def _send(self, letter: Letter) -> None:
        """Send bytes to a client, and note how many and how long."""
        begun = time.perf_counter()
        self.down[letter.client].send(letter)
        self.down_bytes += len(letter.body)
        if letter.client:
            self.sent_s.append(time.perf_counter() - begun)

    def _direction(self) -> torch.Tensor:
        """The mean of the gradients that anchors sent last."""
        return torch.stack(list(self.kept.values())).mean(0) if self.kept else torch.zeros_like(self.model)

    def _next(self) -> ClientEvent:
        """The next event that the decider is told: a letter, or that it is time."""
        while not self.events:
            left = self.wakes[0][0] - self.now_s() if self.wakes else None
            try:
                wait = None if left is None else max(left, 0.0)
                letter = self.unread.popleft() if self.unread else self.inbox.get(timeout=wait)
            except Empty:
                at_s, mark = self.wakes.pop(0)
                return Woken(mark, max(at_s, self.now_s()))
            if isinstance(letter, Gone):
                raise letter.cause
            if letter.kind == SAVED:
                self.saver.take(letter)
                continue
            self.up_bytes += 0 if letter.body is None else len(letter.body)
            if letter.kind == NEAR:
                self.near[letter.task].append(letter)
                continue
            if letter.kind == SUMMED:
                self._summed(letter)
                continue
            given = self.given.get(letter.client)
            if given is None or given.task != letter.task:
                continue  # of a task that another has taken the place of
            self.working.discard(letter.client)
            if letter.kind == LEFT:
                self.left += 1
                return Left(letter.client, letter.task, self.now_s())
            if letter.kind == CHANGED:
                affinity = ()
                if self.jobs is not None:
                    body, affinity = self.jobs.values.split(letter.body, letter.heads)
                    letter = letter._replace(body=body)
                self.arrived[letter.client, letter.task] = letter, given
                self.steps[letter.client] += letter.steps
                at_s = given.at_s, self.now_s()
                return Answered(letter.client, letter.task, given.version, letter.steps, *at_s, affinity)
        return self.events.popleft()

    def _summed(self, letter: Letter) -> None:
        """Take the answers that a sum is of: the sum goes with the first of them."""
        group = letter.client // self.tree
        mine = [one for one in self.near[letter.task] if one.client // self.tree == group]
        self.near[letter.task] = [one for one in self.near[letter.task] if one not in mine]
        for number, one in enumerate(mine):
            given = self.given[one.client]
            self.working.discard(one.client)
            body = letter.body if number == 0 else None
            self.arrived[one.client, one.task] = one._replace(kind=SUMMED, body=body), given
            self.events.append(Answered(one.client, one.task, given.version, one.steps, given.at_s, self.now_s()))

    def _merge(self, decision: Merge) -> None:
        """The next version: a tensor of its own, since tasks keep the ones that they began with."""
        found = [(part, *self.arrived.pop((part.client, part.task))) for part in decision.parts]
        model = self.model * (1.0 - sum(part.start for part, _, _ in found))
        for part, letter, given in found:
            if part.start:
                model.add_(given.start, alpha=part.start)
            if not part.change:
                continue
            if self.jobs is not None:
                model = self.jobs.merged(model, letter.body, letter.heads, part.change)
                continue
            if letter.kind == SUMMED:  # of equal weights, as a cohort has them
                if letter.body is not None:
                    model.add_(self.flat.of_bytes(letter.body), alpha=part.change)
                continue
            model.add_(self.flat.decoded(letter.body, part.client, part.task), alpha=part.change)
        steps = decision.steps or sum(letter.steps for _, letter, _ in found)
        behind = fmean(self.first + len(self.versions) - given.version for _, _, given in found)
        self.model, self.merged = model, self.merged + steps
        self.versions.append(Version(self.now_s(), len(found), steps, behind))
        if decision.steps:  # sums of parts, each with its share in the whole
            self.losses.append(sum(part.change * letter.note for part, letter, _ in found))
        else:
            self.losses.append(sum(letter.note * letter.steps for _, letter, _ in found) / steps)
        if self.metrics is not None:
            last = self.versions[-1]
            said = {"step": self.first + len(self.versions), "loss": self.losses[-1], "seconds": last.at_s}
            self.metrics.add(said | {"answers": last.answers, "steps": steps, "staleness": behind})
