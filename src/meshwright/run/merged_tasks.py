"""Merged tasks of clients (``sync/merged.py``): the values of a trunk and its heads, steps of a client on some of them,
affinities that it measures, and the models of the server's jobs (MAS, Zhuang et al. 2307.11285)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright.run.record import Off, install, recorder
from meshwright.run.task_heads import TaskHeads
from meshwright.sync.merged import ALL_TASKS, MergedTasks, bits_of
from meshwright.sync.taught import TAUGHT

if TYPE_CHECKING:
    from meshwright.run.data import Batch
    from meshwright.run.flat import Flat
    from meshwright.run.judge import Judge
    from meshwright.run.trainer import Trainer

#: Models of jobs, each with its tasks.
Jobs = list[tuple[tuple[int, ...], torch.Tensor]]


class TaskValues:
    """Which of `flat` values are of the trunk and of each task's head."""

    def __init__(self, trainer: Trainer, flat: Flat, merged: MergedTasks):
        self.flat, self.merged = flat, merged
        self._of: dict[int, torch.Tensor] = {}
        head = head_of(trainer)
        mine = {p.info.name for p in (head.weight, head.bias) if p is not None}
        #: Of every value the task that its head is of, -1 for the trunk.
        self.task = torch.full((sum(flat.sizes),), -1, device=flat.device)
        for held in trainer.optimizer.held:
            place, name = flat.places[held.master.data_ptr()], held.parameter.name
            of = 0 if name in mine else -1
            if name.startswith(TAUGHT):
                of = 1 + int(name.removeprefix(TAUGHT).split(".")[0])
            self.task[place : place + len(held.master)] = of

    def of(self, heads: int) -> torch.Tensor:
        """Whether each value is of the trunk, or of one of the heads; bits, 0 for all."""
        found = self._of.get(heads)
        if found is None:
            found = self.task < 0
            for task in self.merged.heads(heads):
                found = found | (self.task == task)
            self._of[heads] = found
        return found

    @property
    def head_bytes(self) -> tuple[int, ...]:
        """Bytes of each task's head."""
        width = self.flat.dtype.itemsize
        return tuple(int((self.task == task).sum()) * width for task in self.merged.heads(0))

    def body(self, values: torch.Tensor, heads: int) -> torch.Tensor:
        """The bytes of the trunk and of some heads."""
        return self.flat.as_bytes(values[self.of(heads)])

    def placed(self, values: torch.Tensor, body: torch.Tensor, heads: int) -> torch.Tensor:
        """These values with those of such bytes in their places."""
        out = values.clone()
        out[self.of(heads)] = self.flat.of_bytes(body)
        return out

    def split(self, body: torch.Tensor, heads: int) -> tuple[torch.Tensor, tuple[float, ...]]:
        """A client's answer as the bytes of what changed, and the affinities behind them, () where there are none."""
        size = int(self.of(heads).sum()) * self.flat.dtype.itemsize
        return body[:size], tuple(body[size:].clone().view(torch.float64).tolist())


class TaskSteps:
    """A client's steps on some heads of a trunk."""

    def __init__(self, trainer: Trainer, values: TaskValues):
        self.trainer, self.values, self.heads = trainer, values, 0
        #: The step that moments are of since.
        self.since = 0
        #: The affinities of the present task, as bytes, where it has measured them.
        self.affinity: torch.Tensor | None = None

    def begin(self, heads: int) -> None:
        """Train these heads from now on; a job that is another begins with moments of nothing."""
        if heads != self.heads:
            optimizer = self.trainer.optimizer
            for number in range(len(optimizer.held)):
                for moment in optimizer.moments(number):
                    moment.zero_()
            optimizer.set_step(0)
            self.since = self.trainer.step_count
        self.take(heads)
        self.affinity = None

    def take(self, heads: int) -> None:
        """Go on with these heads."""
        self.heads = heads
        head_of(self.trainer).tasks = self.values.merged.heads(heads)

    def measure(self, batch: Batch, gradient) -> None:
        """Measure affinities on a batch; `gradient` gives the loss of those heads that are trained, and its gradient
        in the order of flat values. Each task's is followed for a plain step, of the trunk alone, at the
        highest rate of the schedule, so that all rounds count alike."""
        trainer, flat, head = self.trainer, self.values.flat, head_of(self.trainer)
        here, trunk = flat.values(), self.values.task < 0
        tasks, rate = tuple(range(self.values.merged.tasks)), trainer.settings.lr
        before, rows = self._losses(batch), []
        for task in tasks:
            head.tasks = (task,)
            _, along = gradient(batch)
            head.tasks = tasks
            flat.take(torch.where(trunk, here - rate * along, here))
            trainer.publish()
            rows.append(1 - self._losses(batch) / before)
            flat.take(here)
            trainer.publish()
        self.take(self.heads)
        self.affinity = torch.cat(rows).view(torch.uint8)

    def answer(self, change: torch.Tensor) -> torch.Tensor:
        """The bytes of what changed, with the affinities that were measured."""
        body = self.values.body(change, self.heads)
        return body if self.affinity is None else torch.cat((body, self.affinity))

    def _losses(self, batch: Batch) -> torch.Tensor:
        """The loss of each head on a batch, float64 [tasks], without dropout."""
        trainer, record, found = self.trainer, recorder(), []
        head = head_of(trainer)
        install(Off())
        head.seen = lambda losses: found.append(losses.double().cpu())
        try:
            with torch.no_grad():
                trainer.forwards().run([one._replace(step=-1) for one in trainer.passes(batch)])
        finally:
            head.seen = None
            install(record)
        return torch.stack(found).sum(0)


class JobModels:
    """The server's models: of the job whose turn it is not, by number, and the tasks of those that have begun."""

    def __init__(self, values: TaskValues):
        self.values, self.job = values, ALL_TASKS
        self.tasks: dict[int, tuple[int, ...]] = {}
        self.models: dict[int, torch.Tensor] = {}

    def turn(self, model: torch.Tensor, job: int, tasks: tuple[int, ...]) -> torch.Tensor:
        """Keep the model of the job that ends, and return that of the one whose turn it is."""
        self.models[self.job], self.job = model, job
        self.tasks[job] = tasks
        found = self.models.pop(job, None)
        found = self.models[ALL_TASKS] if found is None else found
        if len(self.tasks) == self.values.merged.groups:
            self.models.pop(ALL_TASKS, None)
        return found

    def merged(self, model: torch.Tensor, change: torch.Tensor, heads: int, share: float) -> torch.Tensor:
        """A model of its own with a share of such a change."""
        out, where = model.clone(), self.values.of(heads)
        out[where] += share * self.values.flat.of_bytes(change)
        return out

    def all(self, model: torch.Tensor) -> Jobs:
        """The models of all tasks, that of the first task first; `model` is the present job's. Tasks whose job has not
        begun are where they were merged."""
        if self.job == ALL_TASKS:
            return [(self.values.merged.heads(0), model)]
        now = self.models | {self.job: model}
        found = [(tasks, now[job]) for job, tasks in self.tasks.items()]
        begun = {task for tasks, _ in found for task in tasks}
        left = tuple(task for task in self.values.merged.heads(0) if task not in begun)
        return sorted(found + ([(left, now[ALL_TASKS])] if left else []), key=lambda one: one[0])


def head_of(trainer: Trainer) -> TaskHeads:
    """The heads of a trainer whose model is on one rank."""
    (stage,) = trainer.stages.values()
    return stage.head


def everywhere(found: Jobs | None, trainer: Trainer, merged: MergedTasks, like: torch.Tensor) -> Jobs:
    """Give every rank the models of jobs that the first one has; collective."""
    device = trainer.mesh.device
    said = torch.zeros(merged.tasks, dtype=torch.int64, device=device)
    for number, (tasks, _) in enumerate(found or []):
        said[number] = bits_of(tasks)
    if trainer.mesh.world > 1:
        dist.broadcast(said, 0)
    out = []
    for number, bits in enumerate(filter(None, said.tolist())):
        model = found[number][1].clone() if found else torch.empty_like(like)
        if trainer.mesh.world > 1:
            dist.broadcast(model, 0)
        out.append((merged.heads(bits), model))
    return out


def judged(judge: Judge, flat: Flat, jobs: Jobs) -> dict[int, float]:
    """The loss of every task by its job's model, in the mean over the tokens that it has; collective."""
    trainer, out = judge.trainer, {}
    for tasks, model in jobs:
        flat.take(model)
        trainer.publish()
        for task in tasks:
            head_of(trainer).tasks = (task,)
            out[task] = judge.loss()
    return dict(sorted(out.items()))
