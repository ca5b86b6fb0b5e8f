"""Messages between the stages of a pipeline: hidden states of tokens, or maps of images; and whether ranks share the
tokens of hidden states at all."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

import msgspec
import torch

from meshwright.lower.partition import stage_layers
from meshwright.plan import Plan
from meshwright.spec import naming
from meshwright.spec.model import Model

if TYPE_CHECKING:
    from meshwright.run.parts import Pass
    from meshwright.run.trainer import Trainer


def message_of(trainer: Trainer, stage: int, p: Pass) -> torch.Tensor:
    """Return an empty buffer for what a stage makes of a microbatch: hidden states [s, b, hidden], of a diffusion
    transformer [1 + s, b, hidden], or, of a classifier, the maps [b, channels, height, width] or vectors [b, width]
    behind its last layer. Rows of groups of ranks have as many tokens as their pass."""
    model = trainer.model
    if naming.denoises(model):  # and what each sample is told of its step and class
        states = trainer.hidden_states()
        return states.new_empty((states.shape[0] + 1, *states.shape[1:]))
    if not naming.classifies(model):
        return trainer.hidden_states(p.tokens.shape[1] if p.segments else 0)
    ends = sum(map(len, stage_layers(trainer.plan, model)[: stage + 1]))
    flow = model.flows[model.block(ends - 1).stream if ends else model.embedding.stream]
    if not flow.scale:  # vectors
        sizes = (trainer.shape.together, flow.hidden)
        return torch.empty(sizes, dtype=trainer.types.compute, device=trainer.mesh.device)
    side = isqrt(flow.length(trainer.train.seq_len))
    sizes = (trainer.shape.together, flow.hidden, side, side)
    return torch.empty(sizes, dtype=trainer.types.compute, device=trainer.mesh.device)


def with_whole_tokens(plan: Plan, model: Model) -> Plan:
    """Return a plan without sequence parallelism where each part of a block has a stream of its own: its ranks share no
    tokens between regions."""
    if model.ways == 1:
        return plan
    return msgspec.structs.replace(plan, layout=msgspec.structs.replace(plan.layout, sp=False))
