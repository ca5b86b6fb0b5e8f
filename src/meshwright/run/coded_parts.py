"""Parts of a batch that a client of a coded gradient computes, in the weights of ``sync/clients/coded.py``."""

from __future__ import annotations

from itertools import chain

import torch

from meshwright.run.data import Batch, Corpus
from meshwright.run.trainer import Trainer
from meshwright.sync.clients.coded import parts_of, step_of, weights


class CodedParts:
    """The parts of a ``client`` of so many, ``copies`` of each among all. Its trainer is one of as many times the
    batch, and its steps of plain SGD are sums of steps: what decays is a share, and shares add up to one."""

    def __init__(self, trainer: Trainer, client: int, num_clients: int, copies: int):
        self.trainer, self.num_clients, self.copies = trainer, num_clients, copies
        self.parts = parts_of(client, num_clients, copies - 1)
        row = weights(num_clients, copies - 1)[client]
        self.weights = row[list(self.parts)].tolist()
        for group in trainer.optimizer.torch.param_groups:
            group["weight_decay"] *= float(row.sum()) / num_clients

    def batch(self, corpus: Corpus, task: int) -> Batch:
        """The parts of a task's step, by whose number the trainer goes on, which gets their weights."""
        self.trainer.step_count = step_of(task)
        found = [corpus.batch(step_of(task), part, self.num_clients) for part in self.parts]
        whole = found[0].num_targets
        times = 1 if whole else self.copies  # the trainer divides by all targets, or by those of its larger batch
        each = len(found[0].tokens) // self.trainer.shape.together
        self.trainer.weights = tuple(chain.from_iterable([times * one] * each for one in self.weights))
        return Batch(
            **{
                name: torch.cat(some) if isinstance(some[0], torch.Tensor) else some[0]
                for name, some in zip(Batch._fields, zip(*found))
            }
        )
