"""Parts of layers that every rank holds whole: projections, vectors, norms, as published tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.run.linear import matmul
from meshwright.run.parameters import INIT_STD
from meshwright.run.pieces import Part


def vector(shared, name: str, width: int, init: str) -> nn.Parameter:
    """A published vector; normal ones have a standard deviation of one."""
    part = Part(name, (width,), (0,), (slice(None),))
    return shared.make(name, (width,), [part], init=init, std=1.0)


def matrix(shared, name: str, rows: int, columns: int, std: float = INIT_STD) -> nn.Parameter:
    """A published matrix."""
    part = Part(name, (rows, columns), (0, 0), (slice(None),))
    return shared.make(name, (rows, columns), [part], std=std)


class Linear(nn.Module):
    """A projection from `inner` features to `outer`; `deep` ones, whose results are added up over all layers, begin
    smaller the more there are (Radford et al. 2019)."""

    def __init__(self, shared, name: str, outer: int, inner: int, *, bias: bool = False, deep: bool = False):
        super().__init__()
        self.low = shared.low
        std = INIT_STD / (2 * shared.model.num_layers) ** 0.5 if deep else INIT_STD
        self.weight = matrix(shared, f"{name}.weight", outer, inner, std)
        self.bias = vector(shared, f"{name}.bias", outer, "zeros") if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = matmul(x, self.weight, self.low)
        return out if self.bias is None else out + self.bias


class PlainNorm(nn.Module):
    """RMSNorm, or with a bias LayerNorm; `offset`: the weight is what one is departed from (Qwen3-Next)."""

    def __init__(self, shared, name: str, width: int, *, bias: bool = False, offset: bool = False):
        super().__init__()
        self.width, self.eps, self.offset = width, shared.model.numerics.norm_eps, offset
        self.weight = vector(shared, f"{name}.weight", width, "zeros" if offset else "ones")
        self.bias = vector(shared, f"{name}.bias", width, "zeros") if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
        return F.rms_norm(x, (self.width,), 1 + self.weight if self.offset else self.weight, self.eps)
