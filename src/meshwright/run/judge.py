"""The loss of a run on text that it does not train on, by forward passes alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.run.data import Corpus
from meshwright.run.record import Off, install, recorder
from meshwright.run.trainer import Trainer

#: Batches that a loss is the mean of, at most.
BATCHES = 8


class Judge:
    """Judges what a trainer holds by held-out text: every replica its share of the rows, with its own parameters, so
    that of replicas that differ it is the mean of their losses. A rank holds a whole copy of the model."""

    def __init__(self, trainer: Trainer, held: Corpus):
        self.trainer, self.held = trainer, held
        self.batches = min(BATCHES, held.num_sequences // held.global_batch)

    def loss(self) -> float:
        """Mean loss per token; collective."""
        trainer, record = self.trainer, recorder()
        dp = trainer.mesh["dp"]
        trainer.settle()
        total = torch.zeros((), dtype=torch.float64, device=trainer.mesh.device)
        install(Off())
        try:
            with torch.no_grad():
                for number in range(self.batches):
                    rows = trainer.rows()
                    mine = self.held.batch(number, dp.index, dp.size) if rows is None else self.held.batch(number)
                    batch = mine if rows is None else mine.taking(rows)
                    for one in trainer.passes(batch):
                        (stage,) = trainer.stages.values()
                        total += stage(None, one).to(torch.float64)
        finally:
            install(record)
        if not dp.alone:
            dist.all_reduce(total, group=dp.handle)
        return float(total) / trainer.rounds.replicas / self.batches
