"""Clients of a server on a virtual clock, in one process: what happens when is simulated, what it comes to is trained.

Every client is the loop and the trainer that it is as a process of its own (:mod:`meshwright.run.client`), and the
server is its loop (:mod:`meshwright.run.client_server`); letters go from one to the other without a network. The order
of answers, and how many steps each is of, are those of :func:`meshwright.simulate.clients.simulate_clients`, so that
they hang on no machine's speed: a time to an accuracy is the same wherever it is found. Steps of tasks that another
takes the place of are not taken.
"""

from __future__ import annotations

from collections import defaultdict, deque
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import msgspec
import torch

from meshwright.plan import Plan
from meshwright.run import data, mesh
from meshwright.run.client import ClientLoop
from meshwright.run.client_server import Given, ServerLoop
from meshwright.run.flat import Flat
from meshwright.run.job import Job
from meshwright.run.judge import Judge
from meshwright.run.mail import CHANGED, STOP, TRAIN, Letter
from meshwright.run.mesh import AxisGroup, ProcessMesh
from meshwright.run.pruned import PrunedModel, PrunedSteps
from meshwright.run.trainer import Trainer
from meshwright.simulate.clients import ClientSizes, simulate_clients
from meshwright.sync.clients import Answered, Left
from meshwright.sync.policy import read
from meshwright.world.crowd import ALIKE, Crowd


class JudgedVersion(NamedTuple):
    """A version of the server's model: when it was there, the steps of clients that had gone into it, and its loss and
    accuracy on what is held out."""

    at_s: float
    steps: int
    loss: float
    accuracy: float


class _Tray:
    """Letters from one to another that nobody carries. Tasks are handed to a client one by one, who is told to stop
    behind each."""

    def __init__(self) -> None:
        self.letters: deque[Letter] = deque()

    def send(self, letter: Letter) -> None:
        self.letters.append(letter)

    def get(self) -> Letter:
        """Return the letter behind a task."""
        return Letter(STOP, 0)

    def empty(self) -> bool:
        """Whether something interrupts a task: nothing does, as its steps are known when it begins."""
        return True


def _place(plan: Plan, client: int) -> ProcessMesh:
    """The mesh of a client, whose groups of several ranks it never uses."""
    groups = {
        name: AxisGroup(name=name, ranks=ranks, index=ranks.index(client))
        for name, sets in mesh.members(plan).items()
        for ranks in sets
        if client in ranks
    }
    where = mesh.coordinates(plan, client) | mesh.expert_coordinates(plan, client)
    return ProcessMesh(
        plan=plan, rank=client, world=plan.num_ranks, device=torch.device("cpu"), coordinates=where, groups=groups
    )


class _Clients:
    """The clients of a job and their server, with letters between them."""

    def __init__(self, job: Job, world: Crowd):
        policy, count = read(job.plan.sync.policy), job.plan.layout.dp
        how = {"vocab": job.model.vocab, "model": job.model, "seed": job.settings.seed}
        corpus = data.load(Path(job.corpus), job.train, **how)
        corpus, held = data.held_out(corpus, job.held_out)
        alike = msgspec.structs.replace(world, speeds=ALIKE, jitter=ALIKE, links=ALIKE, drop=0.0)  # the clock has those
        self.up, self.down = [_Tray() for _ in range(count)], [_Tray() for _ in range(count)]
        self.clients = []
        for client in range(count):
            trainer = Trainer(job.model, job.plan, job.train, _place(job.plan, client), settings=job.settings)
            loop = ClientLoop(
                client, trainer, Flat(trainer), corpus, alike, self.up[client], self.down[client],
                float(policy.values.get("mu", 0.0)),
            )  # fmt: skip
            if policy.pruning is not None:
                loop.pruned = PrunedSteps(trainer, PrunedModel(trainer, loop.flat, policy.pruning))
            self.clients.append(loop)
        first = self.clients[0].trainer
        self.server = ServerLoop(policy.rule.decider(policy.values, count), Flat(first), self.down, SimpleQueue(), 0)
        if policy.pruning is not None:
            self.server.pruned = PrunedModel(first, self.server.flat, policy.pruning)
        whole = msgspec.structs.replace(job.train, global_batch=held.num_sequences - held.padding)
        judged = msgspec.structs.replace(held, global_batch=whole.global_batch, padding=0)
        alone = mesh.alone()
        pipeline = msgspec.structs.replace(alone.plan.pipeline, microbatch=whole.global_batch)
        plan = msgspec.structs.replace(alone.plan, pipeline=pipeline)
        judges = Trainer(job.model, plan, whole, msgspec.structs.replace(alone, plan=plan), settings=job.settings)
        chosen = judged.chosen[: whole.global_batch]
        self.judge = Judge(judges, msgspec.structs.replace(judged, chosen=chosen))
        self.judged = judges

    def answer(self, event: Answered, given: Given) -> None:
        """Have a client do the task that it answers, with as many steps as it did of it."""
        loop, tray = self.clients[event.client], self.down[event.client]
        mine = [letter for letter in tray.letters if letter.task == event.task]
        # an answer may be under way when the next task comes, and never behind that one's
        tray.letters = deque(letter for letter in tray.letters if letter.task > event.task)
        for letter in mine:
            loop.act(letter._replace(steps=event.steps, note=0.0) if letter.kind == TRAIN else letter)
        (letter,) = self.up[event.client].letters
        self.up[event.client].letters.clear()
        if letter.kind != CHANGED:  # a client that diverges has nothing to send
            raise FloatingPointError(f"the loss of client {event.client} is not a number")
        self.server.arrived[event.client, event.task] = letter, given

    def look(self, at_s: float) -> JudgedVersion:
        """Judge the server's model as it is."""
        server, model = self.server, self.server.model.clone()
        if server.pruned is not None and server.pruned.mask is not None:
            model = server.pruned.masked(model)
        held = {h.parameter.name: h.master for h in self.judged.optimizer.held}
        with torch.no_grad():
            for one in self.clients[0].trainer.optimizer.held:
                at = self.clients[0].flat.places[one.master.data_ptr()]
                held[one.parameter.name].copy_(model[at : at + len(one.master)])
        self.judged.publish()
        self.judged.settle()
        loss = self.judge.loss()
        return JudgedVersion(at_s, server.merged, loss, float(self.judge.accuracy or 0.0))


def train_by_clock(job: Job, world: Crowd, *, message_s: float = 0.0) -> list[JudgedVersion]:
    """Train the clients of a `job` until as many steps of each are merged as it has, and return all versions, judged.
    A pass over a client's share of a batch takes a second, a whole model on its way `message_s`; the `world` says how
    clients differ. Where a client diverges the last version has an infinite loss, and nothing is classified rightly.

    The model keeps no running statistics, and this process is in no job of several.
    """
    found, policy, count = [], read(job.plan.sync.policy), job.plan.layout.dp
    clients, tasks = _Clients(job, world), defaultdict(dict)
    server, at = clients.server, 0
    sizes = ClientSizes(
        step_s=(1.0,) * count,
        pass_s=(1.0,) * count,
        down_s=(message_s,) * count,
        up_s=(message_s,) * count,
        down_bytes=server.flat.model_bytes,
        up_bytes=sum(server.flat.wire_bytes),
        pruning=policy.pruning,
        prunable=0 if server.pruned is None else int(server.pruned.prunable.sum()),
        element_bytes=server.flat.dtype.itemsize,
    )
    rounds = simulate_clients(sizes, policy.rule.decider(policy.values, count), world, job.steps * count)
    for entry in rounds.log:
        event = entry.event
        if isinstance(event, Answered):
            try:
                clients.answer(event, tasks[event.client].pop(event.task))
            except FloatingPointError:
                return [*found, JudgedVersion(event.at_s, server.merged, inf, 0.0)]
        elif isinstance(event, Left):
            tasks[event.client].pop(event.task, None)
        for decision in entry.decisions:
            server.do(decision)
            if (given := server.given.get(getattr(decision, "client", -1))) is not None:
                tasks[decision.client][given.task] = given
        while at < len(server.versions):
            at += 1
            found.append(clients.look(rounds.versions[at - 1].at_s))
    return found
