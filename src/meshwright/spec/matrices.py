"""Counts of weight matrices: the layers of optimizers that scale each by its norm."""

from __future__ import annotations

import msgspec

from meshwright.spec import naming
from meshwright.spec.architecture import Model
from meshwright.spec.layers import Attention, Block, Moe


def num_matrices(model: Model) -> int:
    """Return how many tensors of a published model have more than one dimension, each expert's own among them; of a
    mixer that is not attention an input and an output projection are counted."""
    names = naming.names(model) if naming.school(model) else None
    fused, joined = (
        (False, False) if names is None else (bool(names.qkv), bool(names.gate_up))
    )  # several are one tensor
    blocks = sum(n * _block(block, fused, joined) for n, block in zip(model.layers_by_kind, model.blocks))
    tables = getattr(model.embedding, "num_matrices", 1)
    tables += (getattr(model.embedding, "positions", 0) > 0) + (getattr(model.embedding, "types", 0) > 0)
    tables += len(getattr(model.head, "widths", ()))
    return tables + blocks + (0 if model.tied_embeddings else 1)


def _block(block: Block, fused: bool, joined: bool) -> int:
    mixing = [part for part in (block.mixer, block.attention, block.cross) if part is not None]
    before = sum(getattr(part, "num_matrices", 0) for part in block.before)
    return before + sum(_mixing(part, fused) for part in mixing) + _mlp(block.mlp, joined)


def _mixing(part: msgspec.Struct, fused: bool) -> int:
    if not isinstance(part, Attention):
        return 2
    queries = 2 if part.q_lora_rank else 1
    keys = 2 if part.kv_lora_rank or not part.key_as_value else 1
    return (1 if fused else queries + keys) + 1


def _mlp(mlp: msgspec.Struct | None, joined: bool) -> int:
    if mlp is None:
        return 0
    each = 3 if getattr(mlp, "gated", False) and not joined else 2
    if not isinstance(mlp, Moe):
        return each
    return mlp.experts * each + 1 + (each if mlp.shared_ffn else 0) + mlp.shared_gate + 2 * (mlp.latent > 0)
