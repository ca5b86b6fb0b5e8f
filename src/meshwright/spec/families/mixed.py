"""Decoders that mix Llama's parts and GPT-2's: rotary positions with LayerNorm, or gated MLPs with biases.

Phi-1 to Phi-2 (2309.05463), Phi-3.5-MoE (2404.14219), Nemotron-4 (2402.16819), StarCoder 2 (2402.19173), StableLM 2
(2402.17834), Command R (Cohere 2024), OLMo (2402.00838), DBRX (Databricks 2024).
"""

from __future__ import annotations

import msgspec

from meshwright.spec.architecture import Model
from meshwright.spec.families.experts import experts_of
from meshwright.spec.families.gpt import layernorm_block, plain_mlp
from meshwright.spec.families.llama import gated_mlp
from meshwright.spec.families.parts import (
    decoder,
    grouped_attention,
    normed_full_width,
    normed_per_head,
    windows,
    with_window,
)
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.layers import Block, Dense, Moe


def phi(r: ConfigReader) -> Model:
    """Phi-1, Phi-1.5 and Phi-2: parallel, one norm, biases everywhere, the head too."""
    attention = grouped_attention(r, qkv_bias=True, out_bias=True)
    if r.flag("qk_layernorm"):
        attention = normed_per_head(attention, norm_vectors=2)
    block = layernorm_block(attention, plain_mlp(r, activation="gelu_new"), norms=1, parallel=True)
    return decoder(r, [block] * r.layers(), tied=False, head_bias=True)


def phimoe(r: ConfigReader) -> Model:
    """Phi-3.5-MoE: LayerNorms, sixteen gated experts."""
    biased = r.flag("attention_bias")
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased)
    experts, top_k = experts_of(r, "num_local_experts", "num_experts")
    r.ignore("num_experts", "moe_intermediate_size")
    act = r.activation("hidden_act", default="silu")
    moe = Moe(experts=experts, top_k=top_k, ffn=r.int("intermediate_size"), gated=True, activation=act)
    layers = r.layers()
    blocks = [
        Block(attention=with_window(attention, w), mlp=moe, norm="layernorm", norms=2, norm_vectors=2)
        for w in windows(r, layers)
    ]
    return decoder(r, blocks, tied=False, head_bias=r.flag("lm_head_bias"))


def nemotron(r: ConfigReader) -> Model:
    """Nemotron-4 and Minitron: squared ReLU, no biases but those of the norms."""
    biased = r.flag("attention_bias")
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased)
    mlp = Dense(
        ffn=r.int("intermediate_size"),
        gated=False,
        bias=r.flag("mlp_bias"),
        activation=r.activation("hidden_act", default="relu2"),
    )
    return decoder(r, [layernorm_block(attention, mlp)] * r.layers(), tied=False)


def starcoder2(r: ConfigReader) -> Model:
    """StarCoder 2: grouped queries and a window, biases on request."""
    biased = r.flag("use_bias", default=True)
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased)
    mlp = plain_mlp(r, activation="gelu_pytorch_tanh", bias=biased)
    r.ignore("mlp_type", "norm_type")
    layers = r.layers()
    return decoder(r, [layernorm_block(with_window(attention, w), mlp) for w in windows(r, layers)], tied=True)


def stablelm(r: ConfigReader) -> Model:
    """StableLM: gated MLP behind LayerNorm."""
    attention = grouped_attention(r, qkv_bias=r.flag("use_qkv_bias"))
    if r.flag("qk_layernorm"):
        attention = normed_full_width(attention)
    parallel = r.flag("use_parallel_residual")
    block = layernorm_block(attention, gated_mlp(r), norms=1 if parallel else 2, parallel=parallel)
    return decoder(r, [block] * r.layers(), tied=False)


def cohere(r: ConfigReader) -> Model:
    """Command R: parallel, one norm without bias, tied embeddings."""
    return _cohere(r, [0] * r.layers())


def cohere2(r: ConfigReader) -> Model:
    """Command R7B and Command A: three of four layers slide, and only those rotate."""
    every = r.int("sliding_window_pattern", "_sliding_window_pattern", default=4)
    return _cohere(r, windows(r, r.layers(), default_window=4096, every=every), rotary_everywhere=False)


def _cohere(r: ConfigReader, layer_windows: list[int], *, rotary_everywhere: bool = True) -> Model:
    biased = r.flag("attention_bias")
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased)
    if r.flag("use_qk_norm"):
        attention = normed_full_width(attention)
    mlp = gated_mlp(r)

    def block(window: int) -> Block:
        layer = msgspec.structs.replace(attention, window=window, rotary=rotary_everywhere or window > 0)
        return layernorm_block(layer, mlp, norms=1, norm_vectors=1, parallel=True)

    return decoder(r, [block(w) for w in layer_windows], tied=True)


def olmo(r: ConfigReader) -> Model:
    """OLMo: norms without any weight."""
    biased = r.flag("attention_bias")
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased)
    r.ignore("clip_qkv")
    return decoder(r, [layernorm_block(attention, gated_mlp(r), norm_vectors=0)] * r.layers(), tied=False)


def hf_olmo(r: ConfigReader) -> Model:
    """OLMo in the words of its own repository, which can also switch to biases and learned positions."""
    for key in ("attention_layer_norm", "norm_after"):
        if r.flag(key):
            r.fault("M005", f"{key} is not modelled", key, "modelled: false")
    r.ignore("activation_type", "alibi_bias_max", "attention_layer_norm_with_affine", "block_group_size")
    r.ignore("block_type", "clip_qkv", "flash_attention", "precision", "scale_emb_init")
    r.ignore("scale_logits", "embedding_layer_norm", "init_cutoff_factor", "multi_query_attention", "vocab_size")
    biased, hidden = r.flag("include_bias"), r.int("hidden_size")
    attention = grouped_attention(
        r,
        kv_heads=1 if r.flag("multi_query_attention") else None,
        qkv_bias=biased,
        out_bias=biased,
        rotary=r.flag("rope"),
    )
    activation = r.activation("activation_type", default="swiglu")
    gated = activation == "swiglu"
    width = r.int("mlp_hidden_size", default=r.int("mlp_ratio", default=4) * hidden)
    mlp = Dense(ffn=max(1, width // 2) if gated else width, gated=gated, bias=biased, activation=activation)
    affine = r.flag("layer_norm_with_affine", default=True)
    norm_bias = r.flag("bias_for_layer_norm", default=biased)
    block = layernorm_block(attention, mlp, norm_vectors=(2 if norm_bias else 1) if affine else 0)
    if r.text("layer_norm_type", default="default") == "rms":
        block = msgspec.structs.replace(block, norm="rmsnorm")
    length = r.int("max_position_embeddings", default=1024)
    tied = r.flag("weight_tying", default=True)
    learned = not r.flag("alibi") and not attention.rotary
    return decoder(
        r,
        [block] * r.layers(),
        tied=tied,
        vocab=r.int("embedding_size", "vocab_size"),
        max_seq_len=length,
        learned_positions=length if learned else 0,
        head_bias=biased and not tied,
    )


def olmo2(r: ConfigReader) -> Model:
    """OLMo 2 and 3: norms behind attention and MLP, queries and keys normalised over their full width."""
    biased = r.flag("attention_bias")
    attention = normed_full_width(grouped_attention(r, qkv_bias=biased, out_bias=biased))
    mlp, layers = gated_mlp(r), r.layers()
    every, window = (1, 0) if r.family == "olmo2" else (4, 4096)
    layer_windows = windows(r, layers, default_window=window, every=every)
    blocks = [
        Block(attention=with_window(attention, w), mlp=mlp, norm="rmsnorm", norms=2, norm_after=True, norm_vectors=1)
        for w in layer_windows
    ]
    return decoder(r, blocks, tied=False)


def dbrx(r: ConfigReader) -> Model:
    """DBRX: sixteen gated experts behind LayerNorms without bias."""
    inner, ffn = r.section("attn_config"), r.section("ffn_config")
    attention = grouped_attention(r, kv_heads=inner.int("kv_n_heads", default=1))
    r.divides("num_attention_heads", "hidden_size", attention.heads, r.int("hidden_size"))
    moe = Moe(
        experts=ffn.int("moe_num_experts"),
        top_k=ffn.int("moe_top_k"),
        ffn=ffn.int("ffn_hidden_size"),
        gated=True,
        activation="silu",
    )
    ffn.at_most("moe_top_k", "moe_num_experts", moe.top_k, moe.experts)
    block = Block(attention=attention, mlp=moe, norm="layernorm", norms=2, norm_vectors=1)
    return decoder(r, [block] * r.layers(), tied=False)
