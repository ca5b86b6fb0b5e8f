"""The slow reading of a model: every tensor of its checkpoint by name and shape, one layer at a time."""

from __future__ import annotations

from math import prod

from meshwright.spec.model import Attention, Block, Dense, Model, Moe

Shapes = dict[str, tuple[int, ...]]


def tensors(model: Model) -> Shapes:
    """Name and shape of every tensor of the model."""
    h, width = model.hidden, model.embedding.width or model.hidden
    found: Shapes = {"embed_tokens.weight": (model.vocab, width)}
    if model.embedding.width:
        found["project_in.weight"] = (h, width)
        found["project_out.weight"] = (width, h)
    if model.learned_positions:
        found["embed_positions.weight"] = (model.learned_positions, h)
    found |= _norm("embed_norm", h, model.embedding.norm_vectors)
    for layer, kind in enumerate(model.pattern):
        found |= {f"layers.{layer}.{name}": shape for name, shape in _block(model.blocks[kind], h).items()}
    found |= _norm("norm", h, model.head.norm_vectors)
    if not model.tied_embeddings:
        found["lm_head.weight"] = (model.vocab, width)
    if model.head.bias:
        found["lm_head.bias"] = (model.vocab,)
    return found


def count(shapes: Shapes) -> int:
    """Numbers in all tensors together."""
    return sum(prod(shape) for shape in shapes.values())


def _norm(name: str, width: int, vectors: int) -> Shapes:
    return {f"{name}.{part}": (width,) for part in ("weight", "bias")[:vectors]}


def _linear(name: str, into: int, out: int, bias: bool = False) -> Shapes:
    found: Shapes = {f"{name}.weight": (out, into)}
    if bias:
        found[f"{name}.bias"] = (out,)
    return found


def _block(block: Block, h: int) -> Shapes:
    found: Shapes = {}
    for index in range(block.norms):
        found |= _norm(f"norm{index}", h, block.norm_vectors)
    if block.scale_params:
        found["scales"] = (block.scale_params,)
    found |= _attention(block.attention, h)
    return found | (_mlp("mlp", block.mlp, h) if isinstance(block.mlp, Dense) else _moe(block.mlp, h))


def _attention(a: Attention, h: int) -> Shapes:
    latent = a.kv_lora_rank > 0
    found: Shapes = {}
    if a.q_lora_rank:
        found |= _linear("q_a_proj", h, a.q_lora_rank, a.qkv_bias)
        found |= _norm("q_a_norm", a.q_lora_rank, 1)
        found |= _linear("q_b_proj", a.q_lora_rank, a.heads * a.head_dim)
    else:
        found |= _linear("q_proj", h, a.heads * a.head_dim, a.qkv_bias and not latent)
    if latent:
        nope = a.head_dim - a.rope_head_dim
        found |= _linear("kv_a_proj_with_mqa", h, a.kv_lora_rank + a.rope_head_dim, a.qkv_bias)
        found |= _norm("kv_a_norm", a.kv_lora_rank, 1)
        found |= _linear("kv_b_proj", a.kv_lora_rank, a.heads * (nope + a.v_head_dim))
    else:
        found |= _linear("k_proj", h, a.kv_heads * a.head_dim, a.qkv_bias)
        if not a.key_as_value:
            found |= _linear("v_proj", h, a.kv_heads * a.v_head_dim, a.qkv_bias)
    found |= _linear("o_proj", a.heads * a.v_head_dim, h, a.out_bias)
    if a.qk_norm_params:
        found["qk_norm.weight"] = (a.qk_norm_params,)
    if a.sinks:
        found["sinks"] = (a.heads,)
    if a.index_heads:
        found |= _linear("indexer.wq_b", a.q_lora_rank or h, a.index_heads * a.index_head_dim)
        found |= _linear("indexer.wk", h, a.index_head_dim)
        found |= _norm("indexer.k_norm", a.index_head_dim, 2)
        found |= _linear("indexer.weights_proj", h, a.index_heads)
    return found


def _mlp(name: str, mlp: Dense, h: int) -> Shapes:
    found = _linear(f"{name}.up_proj", h, mlp.ffn, mlp.bias) | _linear(f"{name}.down_proj", mlp.ffn, h, mlp.bias)
    return found | (_linear(f"{name}.gate_proj", h, mlp.ffn, mlp.bias) if mlp.gated else {})


def _moe(moe: Moe, h: int) -> Shapes:
    found: Shapes = {"gate.weight": (moe.experts, h)}
    if moe.router_bias:
        found["gate.bias"] = (moe.experts,)
    if moe.shared_gate:
        found["shared_gate.weight"] = (1, h)
    for index in range(moe.experts):
        expert = Dense(ffn=moe.ffn, gated=moe.gated, bias=moe.bias, activation=moe.activation)
        found |= _mlp(f"experts.{index}", expert, h)
    if moe.shared_ffn:
        shared = Dense(ffn=moe.shared_ffn, gated=moe.gated, bias=moe.bias, activation=moe.activation)
        found |= _mlp("shared_experts", shared, h)
    return found
