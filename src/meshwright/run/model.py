"""A model's stages as modules: layers by the naming scheme of its tensors, with embedding and head at the ends."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.run.encoder import EncoderEmbedding, EncoderHead, EncoderLayer
from meshwright.run.hybrid import HybridHead, HybridLayer
from meshwright.run.moe import Mixture
from meshwright.run.pair import PairEmbedding, PairHead, PairLayer
from meshwright.run.parts import AttentionModule, EmbeddingModule, HeadModule, Mlp, Norm, Pass, Shared, dropped
from meshwright.spec import naming
from meshwright.spec.layers import Moe


class BlockModule(nn.Module):
    """One block: x + attention(norm(x)), then + mlp(norm(x))."""

    def __init__(self, shared: Shared, layer: int, recompute: str):
        super().__init__()
        block, prefix = shared.model.block(layer), shared.names.layer.format(layer)
        self.shared, self.layer, self.recompute = shared, layer, recompute
        first, second = (prefix + word for word in shared.names.norms)
        width, sums = shared.model.hidden, shared.shard_sums
        self.attention_norm = Norm(shared, first, width, block, sums=sums)
        self.attention = AttentionModule(shared, prefix, block.attention, block)
        self.attention.drops_core = recompute == "selective"
        self.mlp_norm = Norm(shared, second, width, block, sums=sums)
        if isinstance(block.mlp, Moe):
            self.mlp = Mixture(shared, prefix, block.mlp)
        else:
            self.mlp = Mlp(shared, prefix, block.mlp)

    def forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self._forward, x, p, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, p)

    def _forward(self, x: torch.Tensor, p: Pass) -> torch.Tensor:
        x = x + dropped(self.shared, self.attention(self.attention_norm(x), p), p, 2 * self.layer + 1)
        return x + dropped(self.shared, self.mlp(self.mlp_norm(x)), p, 2 * self.layer + 2)


def modules(shared: Shared) -> tuple[type, type, type]:
    """The modules of a model's embedding, layers and head, by its naming scheme."""
    match naming.school(shared.model):
        case "mamba2" | "qwen3_5":
            return EmbeddingModule, HybridLayer, HybridHead
        case "bert":
            return EncoderEmbedding, EncoderLayer, EncoderHead
        case "t5":
            return PairEmbedding, PairLayer, PairHead
    return EmbeddingModule, BlockModule, HeadModule


class Stage(nn.Module):
    """A virtual stage: some layers, with the embedding before the first and the head behind the last."""

    def __init__(self, shared: Shared, stage: int, layers: tuple[int, ...], modes: tuple[str, ...], *, first: bool,
                 last: bool, tied: EmbeddingModule | None = None):  # fmt: skip
        super().__init__()
        self.stage, self.first, self.last = stage, first, last
        embedding, layer_of, head = modules(shared)
        self.embedding = embedding(shared) if first else None
        self.layers = nn.ModuleList(layer_of(shared, layer, mode) for layer, mode in zip(layers, modes))
        if last:
            tied = self.embedding if shared.model.tied_embeddings and tied is None else tied
        self.head = head(shared, tied) if last else None

    def forward(self, x: torch.Tensor | None, p: Pass) -> torch.Tensor:
        """Hidden states in (None for the first stage), hidden states or the scaled loss out."""
        if self.embedding is not None:
            x = self.embedding(p)
        for layer in self.layers:
            out = layer(x, p)
            x = layer.merge(x, out) if hasattr(layer, "merge") else out  # of several streams one has changed
        return self.head(x, p) if self.head is not None else x
