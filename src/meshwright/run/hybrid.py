"""Decoders with other mixers than attention: parts one after the other, each behind a norm (Mamba-2, Qwen3.5)."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.run.parts import EmbeddingModule, HeadModule, Mlp, Norm, dropped
from meshwright.run.plain import PlainNorm
from meshwright.run.scans import DeltaMixer, GatedAttention, Mamba2Mixer
from meshwright.spec.mixers import Mamba2


class HybridLayer(nn.Module):
    """One layer: x + part(norm(x)) for each of its parts."""

    def __init__(self, shared, layer: int, recompute: str):
        super().__init__()
        block, names = shared.model.block(layer), shared.names
        prefix, width = names.layer.format(layer), shared.model.hidden
        self.shared, self.layer, self.recompute = shared, layer, recompute
        self.parts, self.norms = nn.ModuleList(), nn.ModuleList()
        if isinstance(block.mixer, Mamba2):
            self.parts.append(Mamba2Mixer(shared, prefix + names.mixer, block.mixer))
        elif block.mixer is not None:
            self.parts.append(DeltaMixer(shared, prefix + names.mixer, block.mixer))
        else:
            self.parts.append(GatedAttention(shared, prefix + names.attention, block.attention))
        if block.mlp is not None:
            self.parts.append(Mlp(shared, prefix, block.mlp))
        for name in names.norms[: len(self.parts)]:
            self.norms.append(PlainNorm(shared, prefix + name, width, offset=names.unit_offset))

    def forward(self, x: torch.Tensor, p) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._forward, x, p, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, p)

    def _forward(self, x: torch.Tensor, p) -> torch.Tensor:
        for number, (norm, part) in enumerate(zip(self.norms, self.parts, strict=True), 1):
            out = part(norm(x)) if isinstance(part, Mlp) else part(norm(x), p)
            x = x + dropped(self.shared, out, p, 2 * self.layer + number)
        return x


class HybridHead(HeadModule):
    """The usual head behind a norm whose weight is what one is departed from, where the family has it so."""

    def __init__(self, shared, tied: EmbeddingModule | None):
        super().__init__(shared, tied)
        if shared.names.unit_offset:
            self.norm = PlainNorm(shared, shared.names.final_norm, shared.model.hidden, offset=True)


__all__ = ["EmbeddingModule", "HybridHead", "HybridLayer", "Norm"]
