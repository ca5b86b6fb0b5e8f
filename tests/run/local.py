"""Replicas that take steps of their own, for tests: as processes under a plan, and by hand in one process."""

from __future__ import annotations

import torch

from meshwright.plan import parse
from meshwright.run.data import Batch
from meshwright.run.mesh import alone, build
from meshwright.run.record import Off, Recorder, install
from meshwright.run.settings import Settings
from meshwright.run.trainer import Trainer
from meshwright.spec import naming
from meshwright.spec.workload import Train
from tests.run import classifiers, small

SETTINGS = Settings(precision="float64", lr=1e-2, warmup=3)


FP32 = Settings(lr=1e-2)


def begun(model, text: str, train: Train, settings: Settings = SETTINGS) -> Trainer:
    plan = parse(text)
    return Trainer(model, plan, train, build(plan), settings=settings)


def batch_of(trainer: Trainer, step: int, dp: int, index: int) -> Batch:
    """This rank's part of a global batch of what its model reads."""
    if naming.classifies(trainer.model):
        return classifiers.images(step, dp, index, trainer.train)
    return small.batch(trainer.train, trainer.model.vocab, step, dp, index)


def steps(trainer: Trainer, first: int, last: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps [first, last) on this rank's replica."""
    dp, out = trainer.mesh["dp"], []
    for step in range(first, last):
        result = trainer.step(batch_of(trainer, step, dp.size, dp.index))
        out.append((result.loss, result.grad_norm))
    trainer.settle()
    return out


def state(trainer: Trainer) -> list[tuple]:
    """Everything that a rank holds, as (state, parameter, start, stop, values)."""
    return [(p.key, small.plain(p.parameter), p.start, p.stop, p.values.clone()) for p in trainer.pieces()]


def trained(rank: int, model, text: str, train: Train, last: int, settings: Settings = SETTINGS):
    """The record of a rank of a job: the replica it is in, losses and norms, its state, and (operation, bytes) of
    every exchange of the averages, and whether there was one of gradients."""
    trainer = begun(model, text, train, settings)
    recorder = Recorder(rank=rank, device=torch.device("cpu"), warmup=0, keep=last)
    install(recorder)
    seen = steps(trainer, 0, last)
    install(Off())
    labels = [recorder.recording().labels[i] for i in recorder.recording().label.tolist()]
    sent = [(one.kind, one.num_bytes) for one in labels if one.key == "average"]
    exchanged = any(one.queue == "dp" and one.stage >= 0 and one.key != "average" for one in labels)
    return trainer.rounds.replica, seen, state(trainer), sent, exchanged


def by_hand(rank: int, model, train: Train, replicas: int, every: int | tuple[int, ...], last: int, moments: bool):
    """Losses and norms, and the state, of every replica: one process trains each on its share of the batch, and puts
    the mean in place of all after every so many steps, or after these."""
    share = Train(global_batch=train.global_batch // replicas, seq_len=train.seq_len, dtype=train.dtype)
    plan = parse("tp1 mb1").on(1)
    trainers = [Trainer(model, plan, share, alone(), settings=SETTINGS) for _ in range(replicas)]
    seen: list[list] = [[] for _ in trainers]
    for step in range(last):
        for index, trainer in enumerate(trainers):
            result = trainer.step(small.batch(train, model.vocab, step, replicas, index))
            seen[index].append((result.loss, result.grad_norm))
        if step + 1 in every if isinstance(every, tuple) else (step + 1) % every == 0:
            for same in zip(*(t.pieces() for t in trainers)):
                if same[0].key == "param" or moments:
                    mean = torch.stack([piece.values for piece in same]).mean(0)
                    for piece in same:
                        piece.values.copy_(mean)
            for trainer in trainers:
                trainer.publish()
    return [(a, state(t)) for a, t in zip(seen, trainers)]


def whole(ranks: list[list[tuple]], key: str) -> dict[str, torch.Tensor]:
    """Every published tensor of one state of one replica, from what its ranks hold."""
    chosen = [([s[1:] for s in held if s[0].partition("@")[0] == key],) for held in ranks]
    return small.assemble(chosen, 0)
