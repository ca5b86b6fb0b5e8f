"""How much gradients vary with each operator that is computed in fewer bits, measured where a run trains.

Of one batch the gradient is taken with nothing lowered, then with each operator by itself. What the second differs from
the first, squared and as a part of the first, is the variance that lowering the operator brings: that of its own
weights, and of everything that its result and its input's gradient pass through on their way to others. A prediction
chooses by it (:mod:`meshwright.simulate.lowering`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.plan.lowered import OPERATORS
from meshwright.run.data import Batch
from meshwright.run.parts import Lowering
from meshwright.run.trainer import Trainer


def lowering_of(trainer: Trainer) -> Lowering | None:
    """Return what a rank computes in fewer bits; None where it computes nothing so."""
    found = (getattr(layer, "shared", None) for stage in trainer.stages.values() for layer in stage.layers)
    return next((shared.lowering for shared in found if shared is not None), None)


def measured(trainer: Trainer, batch: Batch) -> dict[str, list[float]]:
    """The variance of the whole job's gradient that each operator of each layer brings, by words. Nothing is updated,
    and what is lowered is as before."""
    lowering = lowering_of(trainer)
    chosen = set() if lowering is None else set(lowering.chosen)

    def gradient(some: set[tuple[str, int]]) -> list[torch.Tensor]:
        if lowering is not None:
            lowering.chosen = some
        trainer._gradients(trainer.passes(batch))
        return [h.gradient.to(torch.float64) for h in trainer.optimizer.held]

    wide = [one.clone() for one in gradient(set())]
    whole = _squares(trainer, wide)
    out: dict[str, list[float]] = {}
    for word in OPERATORS:
        out[word] = []
        for layer in range(trainer.model.num_layers):
            low = gradient({(word, layer)})
            apart = _squares(trainer, [a - b for a, b in zip(low, wide)])
            out[word].append(apart / whole if whole else 0.0)
    if lowering is not None:
        lowering.chosen = chosen
    return out


def _squares(trainer: Trainer, some: list[torch.Tensor]) -> float:
    """The squared length of what all ranks hold parts of, every element counted once."""
    copies = trainer.optimizer.copies.tolist()
    total = torch.zeros((), dtype=torch.float64, device=trainer.mesh.device)
    for one, count in zip(some, copies):
        total += one.square().sum() / count
    world = trainer.mesh["worker"]
    if not world.alone:
        dist.all_reduce(total, group=world.handle)
    return float(total)


def save(path: str, found: dict[str, list[float]], model: str) -> None:
    """Write what was measured, for a plan's ``lowered=``."""
    Path(path).write_text(json.dumps({"model": model, "variances": found}, indent=1) + "\n")
