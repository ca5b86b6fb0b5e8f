"""The loss of a run on text that it does not train on, by forward passes alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.run.data import Batch, Corpus
from meshwright.run.record import Off, install, recorder
from meshwright.run.trainer import Trainer

#: Batches that a loss is the mean of, at most.
BATCHES = 8


def share_of(trainer: Trainer, corpus: Corpus, number: int) -> Batch:
    """Return what a rank takes of a global batch: its replica's rows, or, with groups of ranks, all of it."""
    dp, rows = trainer.mesh["dp"], trainer.rows()
    if trainer.groups is not None:
        return corpus.batch(number)
    return corpus.batch(number, dp.index, dp.size) if rows is None else corpus.batch(number).taking(rows)


def own_of(trainer: Trainer, corpus: Corpus, step: int) -> Batch:
    """Return what a rank takes in a step whose replica has a run of the text of its own."""
    dp, replicas = trainer.mesh["dp"], trainer.rounds.replicas
    each = dp.size // replicas
    return corpus.own(step, dp.index // each, replicas, dp.index % each, each, corpus.global_batch // dp.size)


class Judge:
    """Judges what a trainer holds by held-out text: every replica its share of the rows, with its own parameters, so
    that of replicas that differ it is the mean of their losses. Ranks do the forwards of their schedule, without
    dropout; those of several pools hand hidden states on as in a step, and groups of ranks are formed for each
    batch."""

    def __init__(self, trainer: Trainer, held: Corpus):
        self.trainer, self.held = trainer, held
        self.batches = min(BATCHES, held.num_sequences // held.global_batch)
        self.pipeline = trainer.forwards()

    def loss(self) -> float:
        """Mean loss per token; collective."""
        trainer, record = self.trainer, recorder()
        mesh = trainer.mesh
        trainer.settle()
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        install(Off())
        try:
            with torch.no_grad():
                for number in range(self.batches):
                    plain = [one._replace(step=-1) for one in trainer.passes(share_of(trainer, self.held, number))]
                    if trainer.groups is not None:  # as many passes as the batch's groups have rounds
                        self.pipeline = trainer.forwards()
                    total += self.pipeline.run(plain)
        finally:
            install(record)
            self._let_go()
        if mesh["tp"].index:  # every tensor-parallel rank has the whole loss of its tokens
            total = torch.zeros_like(total)
        if not mesh["world"].alone:
            dist.all_reduce(total, group=mesh["world"].handle)
        return float(total) / trainer.rounds.replicas / self.batches

    def _let_go(self) -> None:
        """Free parameters that were gathered: those of a unit without a backward would be taken for the next step's."""
        for stage in self.trainer.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
