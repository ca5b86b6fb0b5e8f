"""Microbatches of a batch as a rank passes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from meshwright.run.data import Batch
from meshwright.run.parts import Pass
from meshwright.run.rotary import rotaries

if TYPE_CHECKING:
    from meshwright.run.trainer import Trainer


def passes_of(trainer: Trainer, batch: Batch) -> list[Pass]:
    """The microbatches of a batch, cut to the context-parallel rank that a trainer is.

    Raises:
        ValueError: a batch of other rows than the trainer's.
    """
    (length, _, size), device = trainer.shape, trainer.mesh.device
    count, at_dp = trainer.plan.num_microbatches(trainer.train.global_batch), trainer.mesh["dp"].index
    count = trainer.portions.counts[at_dp] if trainer.portions.counts else count
    if batch.tokens.shape != (count * size, length + 1):
        raise ValueError(f"a batch of shape {tuple(batch.tokens.shape)} for {count} x {size} rows of {length}")
    tokens = batch.tokens.to(device)
    targets = tokens[:, 1:] if batch.targets is None else batch.targets.to(device)
    at = trainer.positions
    first = trainer.mesh["dp"].index * count * size
    mine = torch.tensor(trainer.rows() or range(first, first + count * size), device=device)
    out = []
    for i in range(count):
        some = slice(i * size, (i + 1) * size)
        numbers = mine[some]
        places, rotary = at, trainer.rotary
        if batch.positions is not None:
            places = batch.positions[some].to(device)[:, at]
            rotary = rotaries(places, trainer.model, trainer.types.compute)
        out.append(
            Pass(
                tokens=tokens[some, :-1][:, at],
                targets=targets[some][:, at],
                positions=places,
                documents=None if batch.documents is None else batch.documents[some].to(device),
                **rotary,
                rows=at.unsqueeze(1) + numbers.unsqueeze(0) * length,
                scale=(trainer.weights[i] if trainer.weights else trainer.rounds.replicas)
                / (batch.num_targets or trainer.train.tokens_per_step),
                step=trainer.step_count,
            )
        )
    return out
