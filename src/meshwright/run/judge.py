"""The loss of a run on text that it does not train on, by forward passes alone."""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
import torch.distributed as dist

from meshwright.run.data import Batch, Corpus, LabelledSamples
from meshwright.run.data.corpus import BATCHES
from meshwright.run.fsdp import let_go
from meshwright.run.microbatches import own_rows
from meshwright.run.record import Off, install, recorder
from meshwright.run.routes import judged_of, learnt_from, place_of, rows_of
from meshwright.run.trainer import Trainer
from meshwright.spec import naming
from meshwright.spec.convolution import CROSS_ENTROPY
from meshwright.spec.diffusion import NoisyClasses


def share_of(trainer: Trainer, corpus: Corpus, number: int) -> Batch:
    """Return what a rank takes of a global batch: its replica's rows, or, with groups of ranks, all of it."""
    dp, rows = trainer.mesh["dp"], own_rows(trainer)
    if trainer.groups is not None:
        return corpus.batch(number)
    if rows is not None:
        return corpus.batch(number).taking(rows)
    trainers = trainer.plan.trainers
    return corpus.batch(number, dp.index % trainers, trainers)  # those who only sum pass nothing of it


def own_of(trainer: Trainer, corpus: Corpus, step: int) -> Batch:
    """Return what a rank takes in a step whose replica has a run of the text of its own."""
    dp, replicas = trainer.mesh["dp"], trainer.rounds.replicas
    each = dp.size // replicas
    return corpus.own(step, dp.index // each, replicas, dp.index % each, each, corpus.global_batch // dp.size)


class RoutedJudge:
    """Judges models of paths by held-out text: a token's probability is the mean of those that paths say, in the
    weights of the sequence's router; of sequences of one path it is that path's. Nothing is judged of a prefix. Of
    samples it is the squared error of each cluster's own expert, by noise that is the same whatever the plan."""

    def __init__(self, trainer: Trainer, held: Corpus | LabelledSamples):
        self.trainer, self.held = trainer, held
        self.numbers, self.samples = judged_of(held), isinstance(held, LabelledSamples)

    def loss(self) -> float:
        """Mean loss per token; collective."""
        trainer, mesh, held = self.trainer, self.trainer.mesh, self.held
        trainer.settle()
        lot, of, path = place_of(trainer)
        weights = trainer.routes.judged.view(-1, trainer.routes.count)[:, path].double()
        some = torch.nonzero(weights > 0).flatten()
        rows = rows_of(trainer)
        mine, runs = some[lot::of], ceil(ceil(len(some) / of) / rows)
        likely = torch.zeros(len(self.numbers), held.seq_len, dtype=torch.float64)
        for run in range(runs):
            now = mine[run * rows : (run + 1) * rows]
            chosen = np.resize(self.numbers[now.numpy()] if len(now) else self.numbers, rows)
            which = torch.from_numpy(np.resize(now.numpy() if len(now) else [0], rows))
            losses = self._losses(held.sequences_at(chosen), which)[: len(now)]
            likely[now] += weights[now].unsqueeze(1) * (losses if self.samples else torch.exp(-losses))
        if mesh["tp"].index:  # every tensor-parallel rank has the whole loss of its tokens
            likely.zero_()
        likely = likely.to(mesh.device)
        dist.all_reduce(likely, group=mesh["world"].handle)
        if self.samples:
            return float(likely.mean())
        return float(-likely[:, trainer.rounds.policy.paths.prefix - 1 :].log().mean())

    def _losses(self, batch: Batch, which: torch.Tensor) -> torch.Tensor:
        """The loss of each token [rows, seq_len] of a batch under this rank's model; of samples, `which` of those that
        are judged, that of each [rows, 1]."""
        trainer, record, seen = self.trainer, recorder(), []
        passes = [one._replace(step=-1) for one in trainer.passes(batch)]
        if self.samples:
            some = which.to(trainer.mesh.device).split(trainer.shape.together)
            passes = [one._replace(rows=rows) for one, rows in zip(passes, some, strict=True)]
        ((_, stage),) = trainer.stages.items()
        install(Off())
        stage.head.told = lambda losses: seen.append(losses.double().cpu())
        try:
            with torch.no_grad():
                trainer.forwards().run(passes)
        finally:
            stage.head.told = None
            install(record)
            let_go(trainer.stages)
        portions = trainer.plan.memory.loss_portions
        whole = [torch.cat(seen[i : i + portions]) for i in range(0, len(seen), portions)]
        return torch.cat(whole, 1).T


class Judge:
    """Judges what a trainer holds by held-out text: every replica its share of the rows, with its own parameters, so
    that of replicas that differ it is the mean of their losses. Ranks do the forwards of their schedule, without
    dropout; those of several pools hand hidden states on as in a step, and groups of ranks are formed for each batch.
    Of text some batches are judged, of labelled samples all."""

    def __init__(self, trainer: Trainer, held: Corpus, skipped: int = 0):
        """`skipped`: the first tokens of sequences of which nothing is judged."""
        self.trainer, self.held, self.skipped = trainer, held, skipped
        self.batches = held.num_sequences // held.global_batch
        self.classifier = next((s.head for s in trainer.stages.values() if hasattr(s.head, "right")), None)
        #: The share of labelled samples that were classified rightly, once the loss was measured; None of text.
        self.accuracy: float | None = None
        if not naming.labelled(trainer.model):
            self.batches = min(BATCHES, self.batches)
        #: Sequences or samples that are judged.
        self.count = self.batches * held.global_batch - getattr(held, "padding", 0)
        self.pipeline = trainer.forwards()

    def loss(self) -> float:
        """Mean loss per token; collective."""
        trainer, record = self.trainer, recorder()
        mesh = trainer.mesh
        trainer.settle()
        trainer.statistics.join(trainer.joined)
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        if self.classifier is not None:
            self.classifier.right = 0
        grown, batch = trainer.train.global_batch, self.held.global_batch
        if trainer.train.grow and grown != batch:  # one that has grown is judged in batches of its first size
            trainer.take(batch)
        install(Off())
        try:
            with torch.no_grad():
                for number in range(self.batches):
                    batch = share_of(trainer, self.held, number)
                    if self.skipped:
                        learnt = self.held.global_batch * (self.held.seq_len - self.skipped + 1)
                        batch = learnt_from(batch, self.skipped, learnt)
                    plain = [one._replace(step=-1) for one in trainer.passes(batch)]
                    if trainer.groups is not None:  # as many passes as the batch's groups have rounds
                        self.pipeline = trainer.forwards()
                    total += self.pipeline.run(plain)
        finally:
            install(record)
            let_go(trainer.stages)
            if trainer.train.global_batch != grown:
                trainer.take(grown)
        if mesh["tp"].index or trainer.helper is not None:  # each tensor-parallel rank has the whole loss of its tokens
            total = torch.zeros_like(total)
        if not mesh["world"].alone:
            dist.all_reduce(total, group=mesh["world"].handle)
        if self._tells_classes():
            self.accuracy = self._right() / self.count
        return float(total) / trainer.rounds.replicas / (self.count / self.held.global_batch)

    def _tells_classes(self) -> bool:
        model = self.trainer.model
        if isinstance(model.head, NoisyClasses):
            return True
        return naming.classifies(model) and model.head.loss == CROSS_ENTROPY

    def _right(self) -> int:
        """Samples of all ranks that were classified rightly; collective."""
        mesh = self.trainer.mesh
        idle = self.classifier is None or self.trainer.helper is not None
        right = torch.tensor(0 if idle else int(self.classifier.right), device=mesh.device)
        if not mesh["world"].alone:
            dist.all_reduce(right, group=mesh["world"].handle)
        return int(right)
