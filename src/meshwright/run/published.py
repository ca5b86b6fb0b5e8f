"""The published tensors of a model that can be trained: names and shapes, as its modules say them."""

from __future__ import annotations

import torch

from meshwright.plan import parse
from meshwright.run.autoencoder import ImageEncoder
from meshwright.run.mesh import alone
from meshwright.run.model import Stage
from meshwright.run.parameters import Maker
from meshwright.run.parts import Shared
from meshwright.spec import naming
from meshwright.spec.architecture import Model
from meshwright.spec.encoded import denoiser_of, is_encoded


def published_tensors(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model's checkpoint, those of a frozen encoder among them; nothing is allocated."""
    frozen, model = frozen_tensors(model), denoiser_of(model)
    shared = Shared(
        model=model,
        plan=parse("tp1 mb1").on(1),
        mesh=alone(),
        make=Maker(torch.device("meta"), torch.float32),
        names=naming.names(model),
        dropout=0.0,
        seed=0,
        causal=True,
    )
    layers = tuple(range(model.num_layers))
    stage = Stage(shared, 0, layers, ("",) * len(layers), first=True, last=True)
    return _shapes(stage) | frozen


def frozen_tensors(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model's frozen encoder, which has no moments; none where it has no encoder."""
    return _shapes(ImageEncoder(model, torch.device("meta"), torch.float32, 0)) if is_encoded(model) else {}


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {part.name: tuple(part.shape) for p in module.parameters() for part in p.info.parts}
