"""A client of a server: a trainer that takes steps on the server's model when it is told to, and sends what changed."""

from __future__ import annotations

import time
from queue import SimpleQueue
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch

from meshwright.run.client_saving import ClientSaver
from meshwright.run.coded_parts import CodedParts
from meshwright.run.corrected import CorrectedSteps
from meshwright.run.data import Batch, Corpus, LabelledSamples
from meshwright.run.flat import Flat
from meshwright.run.mail import (
    ANCHOR,
    ASK,
    CHANGED,
    DIRECTION,
    GO_ON,
    LEFT,
    SAVE,
    SAVED,
    STOP,
    TRAIN,
    WRITTEN,
    Gone,
    Letter,
    Post,
)
from meshwright.run.result import StepResult
from meshwright.run.trainer import Trainer
from meshwright.world.crowd import Crowd

if TYPE_CHECKING:
    from meshwright.run.merged_tasks import TaskSteps
    from meshwright.run.pruned import PrunedSteps

#: Parts of the text that a client's data is drawn from, where clients' data is uneven; of labelled samples classes are.
PARTS = 10


class ClientLoop:
    """A client's life: tasks one after the other, until the server says stop. ``mu``: how strongly a step is pulled
    back to the model that the task began with."""

    def __init__(
        self,
        client: int,
        trainer: Trainer,
        flat: Flat,
        corpus: Corpus | LabelledSamples,
        world: Crowd,
        up: Post,
        inbox: SimpleQueue[Letter | Gone],
        mu: float = 0.0,
    ):
        self.client, self.trainer, self.flat, self.corpus, self.world = client, trainer, flat, corpus, world
        self.up, self.inbox, self.mu = up, inbox, mu
        #: Samples of each class, of which this client has more of some, where its data are uneven samples.
        self.classes = corpus.groups(PARTS) if world.skew and isinstance(corpus, LabelledSamples) else []
        self.begun: torch.Tensor | None = None
        self.corrected = CorrectedSteps(trainer, flat)
        #: Steps on a pruned model, where the server's is.
        self.pruned: PrunedSteps | None = None
        #: Steps on some heads of a trunk, where tasks are merged.
        self.merged: TaskSteps | None = None
        #: The parts of a batch that this client computes of a task, where several compute each.
        self.parts: CodedParts | None = None
        #: Seconds that were spent ahead of the next step, and are a part of it.
        self.ahead_s = 0.0
        self.step_s: list[float] = []  # of its own device, without what its slowness adds
        #: Writes what this client is into checkpoints, where the run keeps some.
        self.saver: ClientSaver | None = None
        #: The task that it is at, with the losses of its steps so far; its last answer, kept for checkpoints.
        self.working: tuple[Letter, list[float]] | None = None
        self.answer: Letter | None = None
        if mu:
            trainer.before_update.append(self._pull)

    def run(self) -> None:
        """Do all tasks."""
        letter = self._next()
        while letter.kind != STOP:
            letter = self.act(letter)
        while self.saver is not None and self.saver.writing:
            self._kept(self._get())
        self.up.send(Letter(STOP, self.client))

    def act(self, letter: Letter) -> Letter:
        """Do what a letter asks for, and return the next."""
        acts = {TRAIN: self._task, ANCHOR: self._anchor, DIRECTION: self._directed, GO_ON: self._gone_on}
        return acts[letter.kind](letter) if letter.kind in acts else self._next()

    def _get(self) -> Letter:
        found = self.inbox.get()
        if isinstance(found, Gone):
            raise found.cause
        return found

    def _next(self) -> Letter:
        """The next letter that is not about a checkpoint."""
        while self._kept(letter := self._get()):
            pass
        return letter

    def _kept(self, letter: Letter) -> bool:
        """Whether a letter was about a checkpoint; then this client is in it, as it stands between two steps."""
        if letter.kind == SAVE:
            self.saver.begin(self, letter)
        elif letter.kind == WRITTEN:
            self.saver.writing = False
            self.up.send(letter._replace(kind=SAVED))
        return letter.kind in (SAVE, WRITTEN)

    def _answered(self, letter: Letter) -> None:
        """Send the answer of a task, which is kept as long as the server may not have it in its checkpoints."""
        self.working = None
        self.answer = letter if self.saver is not None else None
        self.up.send(letter)

    def _gone_on(self, said: Letter) -> Letter:
        """Go on with the task that a checkpoint was made in, or send its answer once more."""
        if self.working is None:
            self.up.send(self.answer)
            return self._next()
        task, losses = self.working
        return self._steps(task, losses)

    def _task(self, said: Letter) -> Letter:
        """Take the steps of a task on the server's model."""
        self.begun = self._model(said)
        self.flat.take(self.begun)
        self.trainer.publish()
        if self.merged is not None:
            self.merged.begin(said.heads)
            if self.merged.values.merged.measures(said.task):
                now = time.perf_counter()
                self.merged.measure(self._batch(self.trainer.step_count), self.corrected.gradient)
                self.ahead_s = time.perf_counter() - now
        return self._steps(said._replace(body=None), [])

    def _steps(self, said: Letter, losses: list[float]) -> Letter:
        """Take a task's steps behind those of these losses, unless another letter ends it before; the letter that comes
        next."""
        flat, self.working = self.flat, (said, losses)
        slowdown, leaves = self.world.slowdown(self.client, said.task), self.world.drops(self.client, said.task)
        asked = None
        while len(losses) < said.steps and asked is None:
            result = self._step(slowdown, said.task)
            if not result.updated:  # a client that diverges has nothing to send
                leaves = True
                break
            losses.append(result.loss)
            asked = self._interrupted(said)
        if asked is not None and asked.kind != ASK:
            return asked
        if leaves:
            self._answered(Letter(LEFT, self.client, said.task))
            return self._next()
        while said.note and asked is None:  # what changed is held until it is asked for
            letter = self._next()
            if letter.kind != ASK:
                return letter
            asked = letter if letter.task == said.task else None
        self.trainer.settle()
        self.corrected.end()
        change = flat.values() - self.begun
        body = self.merged.answer(change) if self.merged is not None else flat.encoded(change, self.client, said.task)
        self._answered(Letter(CHANGED, self.client, said.task, len(losses), fmean(losses), said.heads, body))
        return self._next()

    def _model(self, said: Letter) -> torch.Tensor:
        """The model of a task."""
        if self.merged is not None:
            return self.merged.values.placed(self.flat.values(), said.body, said.heads)
        if self.pruned is None:
            return self.flat.of_bytes(said.body)
        return self.pruned.model.values(said.body, said.task, (self.trainer.settings.seed, self.client))

    def _directed(self, said: Letter) -> Letter:
        """Keep the direction that the next task's steps begin along."""
        self.corrected.begin(self.flat.of_bytes(said.body))
        return self._next()

    def _anchor(self, said: Letter) -> Letter:
        """Send the mean gradient of so many passes at the server's model. Other letters wait for it."""
        flat, losses, self.working = self.flat, [], None
        flat.take(flat.of_bytes(said.body))
        self.trainer.publish()
        slowdown = self.world.slowdown(self.client, said.task)
        if self.world.drops(self.client, said.task):
            self._answered(Letter(LEFT, self.client, said.task))
            return self._next()
        total = torch.zeros_like(flat.values())
        for number in range(said.steps):
            begun = time.perf_counter()
            loss, gradient = self.corrected.gradient(self._batch(said.task * said.steps + number))
            total += gradient
            losses.append(loss)
            self._took(begun, slowdown)
        body = flat.encoded(total / said.steps, self.client, said.task)
        self._answered(Letter(CHANGED, self.client, said.task, 1, fmean(losses), body=body))
        return self._next()

    def _took(self, begun: float, slowdown: float, passes: int = 1) -> None:
        """Note the seconds of a step's passes, and take as many more as a slow client does."""
        took = time.perf_counter() - begun
        self.step_s.append(took / passes)
        if slowdown > 1:
            time.sleep((slowdown - 1) * took)

    def _interrupted(self, said: Letter) -> Letter | None:
        """A letter that ends the task, if one is here."""
        while not self.inbox.empty():
            letter = self._get()
            if not self._kept(letter) and (letter.kind != ASK or letter.task == said.task):
                return letter
        return None

    def _step(self, slowdown: float, task: int) -> StepResult:
        begun, self.ahead_s = time.perf_counter() - self.ahead_s, 0.0
        parts = self.parts
        batch = self._batch(self.trainer.step_count) if parts is None else parts.batch(self.corpus, task)
        corrected = self.corrected.directed
        if self.pruned is not None:
            result = self.pruned.step(batch, task)
        else:
            result = self.corrected.step(batch) if corrected else self.trainer.step(batch)
        self._took(begun, slowdown, 2 if corrected else 1)
        return result

    def _pull(self) -> None:
        """Add the proximal term's gradient, mu times the distance from where the task began."""
        for held in self.trainer.optimizer.held:
            place = self.flat.places[held.master.data_ptr()]
            away = held.master.detach() - self.begun[place : place + len(held.master)]
            held.gradient.add_(away.to(held.gradient.dtype), alpha=self.mu)

    def _batch(self, step: int) -> Batch:
        """The rows of a client's own step: its share of a global batch, samples that are said to be its own, or drawn
        from the parts of the text, or the classes, it has."""
        count, samples = self.trainer.plan.layout.dp, isinstance(self.corpus, LabelledSamples)
        if samples and self.corpus.clients is not None:
            return self.corpus.own(step, self.client, count, rows=self.corpus.global_batch // count)
        if not self.world.skew:
            return self.corpus.batch(step, self.client, count)
        rng = np.random.default_rng((self.world.seed, self.client, step))
        rows, total = self.corpus.global_batch // count, self.corpus.num_sequences
        if samples:
            shares = self.world.shares(self.client, len(self.classes))
            return self.corpus.drawn(rng, self.classes, shares, rows)
        part = rng.choice(PARTS, rows, p=self.world.shares(self.client, PARTS))
        first, end = part * total // PARTS, np.maximum((part + 1) * total // PARTS, part * total // PARTS + 1)
        return self.corpus.sequences_at(np.minimum(rng.integers(first, end), total - 1))
