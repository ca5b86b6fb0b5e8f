"""Clients of a server as real processes: the deciders of ``sync/clients`` on a real clock.

Every rank is a client (:mod:`meshwright.run.client`); the server is a thread beside the first one. Its decider is the
one that ``simulate/clients.py`` drives with predicted times. Afterwards the same world is simulated with the times that
this run's steps and messages took, and laid beside it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from meshwright.answer.clients import alike_in_data
from meshwright.errors import MeshwrightError
from meshwright.run import launch, mesh
from meshwright.run.begin import begin
from meshwright.run.between import Aggregator
from meshwright.run.checkpoint import AsyncSaver, Meta, identity
from meshwright.run.client import ClientLoop, Flat
from meshwright.run.coded_parts import CodedParts
from meshwright.run.data import Corpus, MixedText
from meshwright.run.job import Job, RunSummary
from meshwright.run.judge import Judge
from meshwright.run.loop import divided, open_corpus
from meshwright.run.mail import (
    ANCHOR,
    ASK,
    CHANGED,
    DIRECTION,
    EXPECT,
    LEFT,
    NEAR,
    STOP,
    SUMMED,
    TRAIN,
    Gone,
    Letter,
    Post,
)
from meshwright.run.metrics import METRICS, Metrics
from meshwright.run.pruned import PrunedModel, PrunedSteps
from meshwright.run.trainer import Trainer
from meshwright.run.world import World
from meshwright.simulate.clients import ClientSizes, Version, simulate_clients
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
    Wake,
    Woken,
)
from meshwright.sync.policy import read
from meshwright.timeline import Timeline
from meshwright.world.crowd import Crowd
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
        metrics: Metrics | None,
    ):
        self.decider, self.flat, self.down, self.inbox = decider, flat, down, inbox
        self.num_steps, self.metrics = num_steps, metrics
        self.model = flat.values()
        self.given: dict[int, Given] = {}
        #: The mask of the model, where it is pruned.
        self.pruned: PrunedModel | None = None
        #: The gradient that each client sent last as an anchor.
        self.kept: dict[int, torch.Tensor] = {}
        self.arrived: dict[tuple[int, int], tuple[Letter, Given]] = {}
        self.wakes: list[tuple[float, int]] = []
        self.near: dict[int, list[Letter]] = defaultdict(list)
        self.events: deque[ClientEvent] = deque()
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

    def now_s(self) -> float:
        """Seconds since the server began."""
        return time.perf_counter() - self.begun_s

    def run(self) -> None:
        """Serve until the end, and say so to all clients, also where something is wrong."""
        try:
            state, event = self.decider.begin(), Begun(0.0)
            while True:
                state, decisions = self.decider.decide(state, event)
                self.log.append(LogEntry(event, decisions, self.now_s()))
                self._announce(decisions)
                for decision in decisions:
                    self._do(decision)
                    if self.merged >= self.num_steps or launch.stop.requested:
                        return
                event = self._next()
        except BaseException as error:
            self.wrong = error
        finally:
            for client, channel in enumerate(self.down):
                channel.send(Letter(STOP, client))

    def _announce(self, decisions: tuple[ClientDecision, ...]) -> None:
        """Tell aggregators how many answers to wait for."""
        tasks = Counter((d.client // self.tree * self.tree, d.task) for d in decisions if isinstance(d, TrainOn))
        for (leader, task), members in tasks.items() if self.expect else ():
            self.expect[leader].send(Letter(EXPECT, leader, task, members))

    def _do(self, decision: ClientDecision) -> None:
        match decision:
            case TrainOn(client=client, task=task):
                self.given[client] = Given(task, len(self.versions), self.model, self.now_s())
                if decision.directed:
                    self._send(Letter(DIRECTION, client, task, body=self.flat.as_bytes(self._direction())))
                body = self.flat.as_bytes(self.model)
                if self.pruned is not None:
                    body = self.pruned.body(self.model, task, decision.told)
                if decision.anchor:
                    self._send(Letter(ANCHOR, client, task, decision.passes, body=body))
                else:
                    self._send(Letter(TRAIN, client, task, decision.steps, float(decision.hold), body))
            case Ask(client=client):
                self.down[client].send(Letter(ASK, client, self.given[client].task))
            case Merge():
                self._merge(decision)
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
                letter = self.inbox.get(timeout=None if left is None else max(left, 0.0))
            except Empty:
                at_s, mark = self.wakes.pop(0)
                return Woken(mark, max(at_s, self.now_s()))
            if isinstance(letter, Gone):
                raise letter.cause
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
            if letter.kind == LEFT:
                self.left += 1
                return Left(letter.client, letter.task, self.now_s())
            if letter.kind == CHANGED:
                self.arrived[letter.client, letter.task] = letter, given
                self.steps[letter.client] += letter.steps
                return Answered(letter.client, letter.task, given.version, letter.steps, given.at_s, self.now_s())
        return self.events.popleft()

    def _summed(self, letter: Letter) -> None:
        """Take the answers that a sum is of: the sum goes with the first of them."""
        group = letter.client // self.tree
        mine = [one for one in self.near[letter.task] if one.client // self.tree == group]
        self.near[letter.task] = [one for one in self.near[letter.task] if one not in mine]
        for number, one in enumerate(mine):
            given = self.given[one.client]
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
            if letter.kind == SUMMED:  # of equal weights, as a cohort has them
                if letter.body is not None:
                    model.add_(self.flat.of_bytes(letter.body), alpha=part.change)
                continue
            model.add_(self.flat.decoded(letter.body, part.client, part.task), alpha=part.change)
        steps = decision.steps or sum(letter.steps for _, letter, _ in found)
        behind = fmean(len(self.versions) - given.version for _, _, given in found)
        self.model, self.merged = model, self.merged + steps
        self.versions.append(Version(self.now_s(), len(found), steps, behind))
        if decision.steps:  # sums of parts, each with its share in the whole
            self.losses.append(sum(part.change * letter.note for part, letter, _ in found))
        else:
            self.losses.append(sum(letter.note * letter.steps for _, letter, _ in found) / steps)
        if self.metrics is not None:
            last = self.versions[-1]
            said = {"step": len(self.versions), "loss": self.losses[-1], "seconds": last.at_s}
            self.metrics.add(said | {"answers": last.answers, "steps": steps, "staleness": behind})


def train(world: World, job: Job, clients: Crowd) -> dict[str, Any]:
    """The rank `world` of a run of clients; on rank 0 a :class:`RunSummary` of versions as plain values, with what
    clients did under ``clients``.

    Raises:
        MeshwrightError: D codes for the text, H codes for weights, X104 for the metrics; the same on every rank.
    """
    place = mesh.build(job.plan, device=world.device)
    corpus = open_corpus(world, job, place)
    if isinstance(corpus, MixedText):
        help = "name one text: each client has a run of it"
        raise MeshwrightError.one("D009", "clients share out one text, not a mixture", place="--data", help=help)
    corpus, text = divided(job, corpus)
    policy, count = read(job.plan.sync.policy), place["dp"].size
    alike_in_data(policy, clients)
    train = msgspec.structs.replace(job.train, global_batch=policy.copies * job.train.global_batch)
    trainer = Trainer(job.model, job.plan, train, place, settings=job.settings, schedule_params=job.schedule_params)
    begin(job, trainer)
    flat = Flat(trainer)
    down = [Post(client, down=True) for client in range(count)]
    tree = int(policy.values.get("tree", 1))
    leaders = range(0, count, tree) if tree > 1 else range(0)
    up = [Post(client, down=False, merger=client // tree * tree if tree > 1 else 0) for client in range(count)]
    sums = {leader: Post(leader, down=False) for leader in leaders}
    expect = {leader: Post(leader, down=True) for leader in leaders}
    between = _between(trainer, world.rank, tree, up, sums, expect)
    inbox: SimpleQueue[Letter | Gone] = SimpleQueue()
    down[world.rank].open(inbox)
    client = ClientLoop(
        world.rank, trainer, flat, corpus, clients, up[world.rank], inbox, float(policy.values.get("mu", 0.0))
    )
    if policy.copies > 1:
        client.parts = CodedParts(trainer, world.rank, count, policy.copies)
    if policy.pruning is not None:
        client.pruned = PrunedSteps(trainer, PrunedModel(trainer, flat, policy.pruning))
    server = thread = None
    if place.first:
        mail: SimpleQueue[Letter | Gone] = SimpleQueue()
        for channel in sums.values() if sums else up:
            channel.open(mail)
        metrics = Metrics(Path(job.out) / METRICS, done=0) if job.out else None
        server = ServerLoop(
            policy.rule.decider(policy.values, count), Flat(trainer), down, mail, job.steps * count, metrics
        )
        server.expect, server.tree = expect, tree
        if policy.pruning is not None:
            server.pruned = PrunedModel(trainer, server.flat, policy.pruning)
        thread = threading.Thread(target=server.run, name="server", daemon=True)
        thread.start()
    client.run()
    if between is not None:
        between.thread.join()
        if between.wrong is not None:
            raise between.wrong
    if server is not None:
        thread.join()
        for channel in sums.values() if sums else up:
            channel.close()
        if server.wrong is not None:
            raise server.wrong
    down[world.rank].close()
    return _finished(job, trainer, flat, client, server, clients, text)


def _between(
    trainer: Trainer, rank: int, tree: int, up: list[Post], sums: dict[int, Post], expect: dict[int, Post]
) -> Aggregator | None:
    """The aggregator of this rank, at work; None where it has none."""
    if rank not in sums:
        return None
    inbox: SimpleQueue[Letter | Gone] = SimpleQueue()
    for channel in (*up[rank : rank + tree], expect[rank]):
        channel.open(inbox)
    found = Aggregator(Flat(trainer), tree, sums[rank], inbox)
    found.thread.start()
    return found


def _finished(
    job: Job,
    trainer: Trainer,
    flat: Flat,
    client: ClientLoop,
    server: ServerLoop | None,
    clients: Crowd,
    text: Corpus | None,
) -> dict[str, Any]:
    """Give every rank the server's model, judge it by held-out `text`, save it, and tell what was done."""
    place = trainer.mesh
    model = flat.values() if server is None else server.model.clone()
    if server is not None and server.pruned is not None and server.pruned.mask is not None:
        model = server.pruned.masked(model)
    if place.world > 1:
        dist.broadcast(model, 0)
    flat.take(model)
    trainer.publish()
    trainer.settle()
    took = [fmean(client.step_s) if client.step_s else 0.0, float(len(client.step_s))]
    every = [torch.zeros(2, dtype=torch.float64, device=place.device) for _ in range(place.world)]
    if place.world > 1:
        dist.all_gather(every, torch.tensor(took, dtype=torch.float64, device=place.device))
    judged = None
    if text is not None:
        trainer.take(job.train.global_batch)  # of clients that compute parts several times over, once
        trainer.weights = ()
        judged = Judge(trainer, text, job.judged_from).loss()
    saved = _save(job, trainer)
    if server is None:
        return {}
    found = [(step_s, int(steps)) for step_s, steps in (one.tolist() for one in every)]
    summary = _summary(job, trainer, server, found, clients) | {"saved": saved}
    return summary if judged is None else summary | {"judged": {len(server.versions): judged}}


def _save(job: Job, trainer: Trainer) -> str:
    """Save the server's model and the first client's moments."""
    if not job.out:
        return ""
    saver = AsyncSaver(job.out, trainer.mesh["world"], device=trainer.mesh.device, keep=job.keep)
    try:
        first = trainer.mesh.first  # every client holds all that there is, and one of them writes it
        saver.begin(
            [one._replace(owner=one.owner and first) for one in trainer.pieces()],
            Meta(
                step=job.steps,
                seed=job.settings.seed,
                model=job.model.name,
                model_hash=identity(job.model),
                plan=job.plan.text(),
                world=trainer.mesh.world,
                extra={"workload": job.train.text(), "sync": trainer.plan.sync.policy, "joined": True},
            ),
        )
        return str(saver.wait())
    finally:
        saver.close()


def _summary(
    job: Job, trainer: Trainer, server: ServerLoop, found: list[tuple[float, int]], clients: Crowd
) -> dict[str, Any]:
    """The versions as steps of a run, and what clients did, beside the same world simulated."""
    count, versions = len(found), server.versions
    ends = np.array([v.at_s for v in versions])
    columns = {
        "step": np.arange(1, len(versions) + 1),
        "seconds": np.diff(ends, prepend=0.0),
        "loss": np.array(server.losses, np.float64),
        "grad_norm": np.zeros(len(versions)),
        "tokens": np.array([v.steps for v in versions], np.float64) * job.train.tokens_per_step / count,
    }
    ranks = {"rank": np.arange(count), "peak_bytes": np.zeros(count, np.int64)}
    timeline = msgspec.structs.replace(Timeline.bare(identity=job.identity), records={"step": columns, "rank": ranks})
    summary = RunSummary.of(
        timeline, len(versions), device=str(trainer.mesh.device.type), stopped=server.merged < server.num_steps
    )
    simulated = simulated_again(job, server, found, clients)
    said = {
        "seconds": versions[-1].at_s if versions else 0.0,
        "simulated_s": simulated.seconds,
        "simulated_versions": len(simulated.versions),
        "versions": [v._asdict() for v in versions],
        "steps": [steps for _, steps in found],
        "merged": server.merged,
        "left": server.left,
        "down_bytes": server.down_bytes,
        "up_bytes": server.up_bytes,
        "simulated_up_bytes": simulated.up_bytes,
        "step_s": [step_s for step_s, _ in found],
        "log": msgspec.to_builtins(server.log),
    }
    return msgspec.to_builtins(summary) | {"clients": said}


def simulated_again(job: Job, server: ServerLoop, found: list[tuple[float, int]], clients: Crowd) -> Any:
    """The same world on the virtual clock, with this run's own seconds of steps and messages."""
    policy, count = read(job.plan.sync.policy), len(found)
    usual = median(step_s for step_s, steps in found if steps)
    sent = median(server.sent_s) if server.sent_s else 0.0
    up_bytes, tree = sum(server.flat.wire_bytes), server.tree
    sizes = ClientSizes(
        step_s=tuple(step_s or usual for step_s, _ in found),
        pass_s=tuple(step_s or usual for step_s, _ in found),
        pruning=policy.pruning,
        prunable=0 if server.pruned is None else int(server.pruned.prunable.sum()),
        element_bytes=server.flat.dtype.itemsize,
        down_s=(0.0, *([sent] * (count - 1))),
        up_s=(0.0, *([sent * up_bytes / server.flat.model_bytes] * (count - 1))),
        down_bytes=server.flat.model_bytes,
        up_bytes=up_bytes,
        tree=tree,
        near_s=(0.0, *([sent * up_bytes / server.flat.model_bytes] * (count - 1))) if tree > 1 else (),
    )
    return simulate_clients(sizes, policy.rule.decider(policy.values, count), clients, max(1, server.merged))
