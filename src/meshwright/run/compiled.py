"""The pointwise parts of layers as kernels that torch.compile makes, where a plan says ``compile=yes``.

What is compiled are pure functions of tensors: norms, rotations and activations, forward and backward. Products with
weights, exchanges and attention's core are kernels of their own already, and are what a plan orders.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.errors import MeshwrightError
from meshwright.plan import Plan


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is first called with tensors of a kind; as it is where compiling is not asked."""
    return torch.compile(function, dynamic=False)


def rms_normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: bool) -> torch.Tensor:
    """RMSNorm over the last dimension; `offset`: by one plus the weight."""
    kind = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(kind)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (1 + weight.to(kind))).to(x.dtype)
    return wide.to(x.dtype) if weight is None else wide.to(x.dtype) * weight


def layer_normed(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def needed(plan: Plan, kind: str) -> None:
    """Refuse a plan that compiles where this machine has no compiler for devices of a `kind` (``cpu``, ``cuda``).

    Raises:
        MeshwrightError: L009.
    """
    if not any(pool.plan.kernels.compile for pool in plan.pools):
        return
    usual = "clang++" if sys.platform == "darwin" else "g++"
    tool = os.environ.get("CXX") or usual
    lacks = ""
    if kind == "cpu" and shutil.which(tool) is None:
        lacks = f"a C++ compiler ({tool})"
    if kind == "cuda" and importlib.util.find_spec("triton") is None:
        lacks = "Triton"
    if lacks:
        raise MeshwrightError.one(
            "L009",
            f"compile=yes needs {lacks}, which is not there",
            place="plan: kernels.compile = yes",
            help=f"install it{', name another by CXX,' if kind == 'cpu' else ''} or drop compile=yes",
        )
