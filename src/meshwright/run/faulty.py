"""Replicas that are faulty: what they bring to an exchange is noise, their gradient turned round, or nothing."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from meshwright.run.sync import Bucket
from meshwright.run.trainer import Trainer
from meshwright.world.faulty import NOISE, REVERSED, FaultyWorkers


def spoil(trainer: Trainer, faulty: FaultyWorkers) -> None:
    """Have this rank bring what `faulty` says to every sum of gradients, if its replica is one of those."""
    group = trainer.mesh["data"]
    if group.index < group.size - faulty.count:
        return
    for number, one in enumerate(trainer.exchanges):
        if isinstance(one, Bucket):
            draw = torch.Generator(trainer.mesh.device)
            key = np.random.SeedSequence((faulty.seed, trainer.mesh.rank, number, trainer.step_count))
            draw.manual_seed(int(key.generate_state(1)[0]))
            one.spoiled = partial(_spoil, faulty, draw)


def _spoil(faulty: FaultyWorkers, draw: torch.Generator, gradient: torch.Tensor) -> None:
    """Put what is sent in place of a gradient."""
    if faulty.sends == NOISE:
        length = gradient.norm() * faulty.times
        gradient.normal_(generator=draw)
        gradient.mul_(length / gradient.norm())
    else:
        gradient.mul_(-faulty.times if faulty.sends == REVERSED else 0.0)
