"""Activations of an MLP between its projections: pointwise, and gated where the model has gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from meshwright.run.compiled import compiled
from meshwright.spec.layers import Dense, Moe


def activate(up: torch.Tensor, spec: Dense | Moe, compile: bool = False) -> torch.Tensor:
    """The activation of what came up, [..., 2 * ffn] (gate first) when gated; as one kernel where it is compiled."""
    function = ACTIVATIONS[spec.activation]
    if compile:
        return compiled(_activated)(up, spec.activation, spec.gated)
    if not spec.gated:
        return function(up)
    if function is F.silu and not torch.is_inference_mode_enabled():
        return _Gated.apply(up)
    gate, linear = up.chunk(2, dim=-1)
    return function(gate) * linear


def _activated(up: torch.Tensor, name: str, gated: bool) -> torch.Tensor:
    if not gated:
        return ACTIVATIONS[name](up)
    gate, linear = up.chunk(2, dim=-1)
    return ACTIVATIONS[name](gate) * linear


class _Gated(torch.autograd.Function):
    """silu(gate) * linear of both side by side; their gradients are written side by side too."""

    @staticmethod
    def forward(ctx, up):
        gate, linear = up.chunk(2, dim=-1)
        opened = F.silu(gate)
        ctx.save_for_backward(up, opened)
        return opened * linear

    @staticmethod
    def backward(ctx, grad):
        up, opened = ctx.saved_tensors
        gate, linear = up.chunk(2, dim=-1)
        out = torch.empty_like(up)
        to_gate, to_linear = out.chunk(2, dim=-1)
        torch.mul(grad, opened, out=to_linear)
        torch.ops.aten.silu_backward.grad_input(grad * linear, gate, grad_input=to_gate)
        return out


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}
