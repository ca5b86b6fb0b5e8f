"""Microbatches of a batch as a rank passes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from meshwright.lower.waves import rows
from meshwright.run.data import Batch
from meshwright.run.groups import round_passes
from meshwright.run.parts import Pass
from meshwright.run.rotary import rotaries
from meshwright.spec import naming

if TYPE_CHECKING:
    from meshwright.run.trainer import Trainer


def passes_of(trainer: Trainer, batch: Batch) -> list[Pass]:
    """The microbatches of a batch, cut to the context-parallel rank that a trainer is.

    Raises:
        ValueError: a batch of other rows than the trainer's.
    """
    length, _, size = trainer.shape
    count, at_dp = trainer.plan.num_microbatches(trainer.train.global_batch), trainer.mesh["dp"].index
    count = trainer.portions.counts[at_dp] if trainer.portions.counts else count
    samples = naming.labelled(trainer.model)
    if len(batch.tokens) != count * size or not (samples or batch.tokens.shape[1:] == (length + 1,)):
        raise ValueError(f"a batch of shape {tuple(batch.tokens.shape)} for {count} x {size} rows of {length}")
    batch = batch._replace(tokens=batch.tokens.to(trainer.mesh.device))
    first = at_dp * count * size
    mine = torch.tensor(own_rows(trainer) or range(first, first + count * size), device=trainer.mesh.device)
    targets = batch.num_targets or trainer.train.tokens_per_step
    out = []
    for i in range(count):
        some = slice(i * size, (i + 1) * size)
        scale = (trainer.weights[i] if trainer.weights else trainer.rounds.replicas) / targets
        make = sample_pass if samples else pass_of
        out.append(make(trainer, batch, some, mine[some], scale))
    return out


def sample_pass(trainer: Trainer, batch: Batch, some: slice, numbers: torch.Tensor, scale: float) -> Pass:
    """The pass over some labelled samples of a batch, numbered as :func:`pass_of` has it."""
    device = trainer.mesh.device
    return Pass(
        tokens=batch.tokens[some].to(device, trainer.types.compute),
        targets=batch.targets[some].to(device),
        positions=trainer.positions,
        documents=None,
        rotary=None,
        rows=numbers,
        scale=scale,
        step=trainer.step_count,
    )


def grouped(trainer: Trainer, batch: Batch) -> list[Pass]:
    """The microbatches of a rank's rows, one a round, where ranks share documents in groups of their own."""
    found = trainer.groups.of(batch)
    trainer.take_rounds(len(found))
    scale = trainer.rounds.replicas / batch.num_targets
    return round_passes(found, trainer.model, trainer.types.compute, scale, trainer.step_count)


def pass_of(trainer: Trainer, batch: Batch, some: slice, numbers: torch.Tensor, scale: float) -> Pass:
    """The pass over some rows of a batch, which have these `numbers` int64 [rows] in the global batch and a `scale` of
    their loss."""
    at, device, rotary = trainer.positions, trainer.mesh.device, trainer.rotary
    tokens = batch.tokens[some].to(device)
    targets = tokens[:, 1:] if batch.targets is None else batch.targets[some].to(device)
    places = at
    if batch.positions is not None:
        places = batch.positions[some].to(device)[:, at]
        rotary = rotaries(places, trainer.model, trainer.types.compute)
    return Pass(
        tokens=tokens[:, :-1][:, at],
        targets=targets[:, at],
        positions=places,
        documents=None if batch.documents is None else batch.documents[some].to(device),
        **rotary,
        rows=at.unsqueeze(1) + numbers.unsqueeze(0) * trainer.shape.row_tokens,
        scale=scale,
        step=trainer.step_count,
    )


def own_rows(trainer: Trainer) -> tuple[int, ...] | None:
    """The rows of a global batch that a trainer's data-parallel rank takes, in the order of its microbatches; None for
    the usual ones, as many on every rank and those next to each other."""
    size, counts, at = trainer.shape.together, trainer.portions.counts, trainer.mesh["dp"].index
    if counts:
        sizes = trainer.portions.rows or (size,) * len(counts)
        first = sum(count * rows for count, rows in zip(counts[:at], sizes))
        return tuple(range(first, first + counts[at] * sizes[at]))
    if not trainer.places.plan.several:
        return None
    count = trainer.plan.num_microbatches(trainer.train.global_batch)
    dp = trainer.mesh["dp"]
    return tuple(row for m in range(count) for row in rows(dp.size, size, dp.index, m))
