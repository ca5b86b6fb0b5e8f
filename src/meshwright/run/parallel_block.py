"""A block whose attention and MLP read the same input and are added together (GPT-J; Phi-1 to Phi-2, 2309.05463).

Both enter the tensor-parallel region with one gather and leave it with one sum, as ``layers/block.py`` prices it; what
was gathered is kept for the backward.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.run.parts import Mlp, Norm, Pass, Shared, dropped
from meshwright.run.self_attention import AttentionModule


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm for both or one for each."""

    def __init__(self, shared: Shared, layer: int, recompute: str):
        super().__init__()
        block, prefix = shared.model.block(layer), shared.names.layer.format(layer)
        self.shared, self.layer, self.recompute = shared, layer, recompute
        names = [prefix + name for name in shared.names.norms[: block.norms]]
        self.norms = nn.ModuleList(
            Norm(shared, name, shared.model.hidden, block, sums=shared.shard_sums) for name in names
        )
        inside = shared._replace(apart=True)
        self.attention = AttentionModule(inside, prefix, block.attention, block)
        self.attention.core.drops_core = recompute == "selective"
        self.mlp = Mlp(inside, prefix, block.mlp)

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._forward, x, p, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, p)

    def _forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        shared = self.shared
        entered = [shared.entered(norm(x)) for norm in self.norms]
        out = shared.leave(self.attention(entered[0], p) + self.mlp(entered[-1], p))
        out = self.mlp.down.landed(self.attention.out.landed(out))
        return x + dropped(shared, out, p, 2 * self.layer + 1)
