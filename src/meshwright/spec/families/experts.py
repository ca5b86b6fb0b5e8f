"""Decoders whose MLPs are mixtures of experts over grouped-query attention, behind RMSNorms.

Mixtral (2401.04088), Qwen2-MoE and Qwen3-MoE (2407.10671, 2505.09388), OLMoE (2409.02060), DeepSeekMoE
(2401.06066), GLM-4.5 (2508.06471), gpt-oss (2508.10925), Llama 4 (Meta 2025), MiniMax-M2 (MiniMax 2025), Step-3
(2507.19427), MiMo-V2-Flash (Xiaomi 2025).
"""

from __future__ import annotations

import msgspec

from meshwright.spec.architecture import Model
from meshwright.spec.families.llama import block, gated_mlp, normed_attention, qwen_windows
from meshwright.spec.families.parts import (
    decoder,
    grouped_attention,
    normed_full_width,
    normed_per_head,
    note_prediction_layers,
    windows,
    with_window,
)
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.layers import Attention, Dense, Moe

_TOP_K = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")


def experts_of(r: ConfigReader, *count_keys: str, top_k_keys: tuple[str, ...] = _TOP_K) -> tuple[int, int]:
    """The number of routed experts and how many of them each token takes."""
    experts, top_k = r.int(*count_keys), r.int(*top_k_keys)
    r.at_most(r.spelled(*top_k_keys), r.spelled(*count_keys), top_k, experts)
    return experts, top_k


def _mixture(r: ConfigReader, *count_keys: str, ffn: str = "intermediate_size", **fields: object) -> Moe:
    experts, top_k = experts_of(r, *count_keys)
    act = r.activation("hidden_act", default="silu")
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn=r.int(ffn),
        gated=True,
        activation=act,
        shortcut=r.flag("moe_shortcut", default=False),
        **fields,
    )


def mixtral(r: ConfigReader) -> Model:
    """Mixtral: every MLP is a mixture."""
    attention, moe = grouped_attention(r), _mixture(r, "num_local_experts", "num_experts")
    layers = r.layers()
    return decoder(r, [block(with_window(attention, w), moe) for w in windows(r, layers)], tied=False)


def qwen2_moe(r: ConfigReader) -> Model:
    """Qwen2-MoE: biases on query, key and value, shared experts behind a gate."""
    attention = grouped_attention(r, qkv_bias=r.flag("qkv_bias", default=True))
    shared = r.int("shared_expert_intermediate_size", low=0)
    return _qwen_moe(r, attention, shared_ffn=shared, shared_gate=shared > 0)


def qwen3_moe(r: ConfigReader) -> Model:
    """Qwen3-MoE: Qwen3's attention, no shared experts."""
    return _qwen_moe(r, normed_attention(r))


def _qwen_moe(r: ConfigReader, attention: Attention, **fields: object) -> Model:
    layers = r.layers()
    moe = _mixture(r, "num_experts", "num_local_experts", ffn="moe_intermediate_size", **fields)
    every = r.int("decoder_sparse_step", default=1)
    dense_only = set(r.ints("mlp_only_layers") or ())
    sparse = [layer not in dense_only and (layer + 1) % every == 0 for layer in range(layers)]
    if all(sparse):
        r.ignore("intermediate_size")
    dense = moe if all(sparse) else gated_mlp(r)
    blocks = [
        block(with_window(attention, window), moe if is_sparse else dense)
        for window, is_sparse in zip(qwen_windows(r, layers), sparse, strict=True)
    ]
    return decoder(r, blocks, tied=False)


def olmoe(r: ConfigReader) -> Model:
    """OLMoE: 64 small experts, queries and keys normalised over their full width."""
    biased = r.flag("attention_bias")
    attention = normed_full_width(grouped_attention(r, qkv_bias=biased, out_bias=biased))
    r.ignore("clip_qkv")
    return decoder(r, [block(attention, _mixture(r, "num_experts"))] * r.layers(), tied=False)


def deepseek_mixtures(r: ConfigReader, *, router_bias: bool) -> list[Dense | Moe]:
    """DeepSeek's MLPs, one per layer: the first ``first_k_dense_replace`` are dense, the others have routed and
    shared experts of ``moe_intermediate_size``."""
    layers = r.layers()
    first, every = r.int("first_k_dense_replace", default=0, low=0), r.int("moe_layer_freq", default=1)
    shared = r.int("n_shared_experts", "num_shared_experts", default=0, low=0)
    moe = _mixture(r, "n_routed_experts", "num_routed_experts", ffn="moe_intermediate_size", router_bias=router_bias)
    moe = msgspec.structs.replace(moe, shared_ffn=shared * moe.ffn)
    kinds = r.words("mlp_layer_types", length=layers, choices=("dense", "sparse"))
    sparse = [layer >= first and layer % every == 0 for layer in range(layers)]
    if kinds is not None:
        sparse = [kind == "sparse" for kind in kinds]
    if all(sparse):
        r.ignore("intermediate_size")
    dense = moe if all(sparse) else gated_mlp(r)
    return [moe if is_sparse else dense for is_sparse in sparse]


def deepseek(r: ConfigReader) -> Model:
    """DeepSeekMoE, the first of the line: Llama's attention, fine experts."""
    biased = r.flag("attention_bias")
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased)
    return decoder(r, [block(attention, mlp) for mlp in deepseek_mixtures(r, router_bias=False)], tied=False)


def glm4_moe(r: ConfigReader) -> Model:
    """GLM-4.5: grouped queries, DeepSeek's mixtures with the selection bias."""
    note_prediction_layers(r, "num_nextn_predict_layers")
    attention = grouped_attention(r, qkv_bias=r.flag("attention_bias"))
    if r.flag("use_qk_norm"):
        attention = normed_per_head(attention)
    return decoder(r, [block(attention, mlp) for mlp in deepseek_mixtures(r, router_bias=True)], tied=False)


def gpt_oss(r: ConfigReader) -> Model:
    """gpt-oss: every second layer full, a learned sink per head, biases in attention, router and experts."""
    biased = r.flag("attention_bias", default=True)
    attention = grouped_attention(r, head_dim=64, qkv_bias=biased, out_bias=biased, sinks=True)
    r.ignore("experts_per_token")
    moe = _mixture(r, "num_local_experts", "num_experts", bias=True, router_bias=True)
    layer_windows = windows(r, r.layers(), default_window=128, every=2)
    return decoder(r, [block(with_window(attention, w), moe) for w in layer_windows], tied=False)


def llama4(r: ConfigReader) -> Model:
    """Llama 4's text model: three of four layers rotate and attend in chunks, the fourth has no positions and
    attends to everything; mixtures in every ``interleave_moe_layer_step``-th layer."""
    layers = r.layers()
    biased = r.flag("attention_bias")
    normed = r.flag("use_qk_norm", default=True)
    whole = grouped_attention(r, head_dim=128, qkv_bias=biased, out_bias=biased, rotary=False)
    chunk = r.int("attention_chunk_size", default=8192, low=0)
    local = msgspec.structs.replace(whole, rotary=True, window=chunk, chunked=chunk > 0, qk_norm=normed)
    every = r.int("no_rope_layer_interval", default=4)
    rotates = r.ints("no_rope_layers", length=layers if r.config.get("no_rope_layers") else None)
    rotates = rotates or [int((layer + 1) % every != 0) for layer in range(layers)]
    r.ignore("layer_types")

    dense = Dense(ffn=r.int("intermediate_size_mlp"), gated=True, activation=r.activation("hidden_act", default="silu"))
    moe = _mixture(r, "num_local_experts")
    moe = msgspec.structs.replace(moe, shared_ffn=moe.ffn)
    step = r.int("interleave_moe_layer_step", default=1)
    listed = r.ints("moe_layers")
    sparse = set(listed) if listed is not None else set(range(step - 1, layers, step))
    blocks = [block(local if rotates[layer] else whole, moe if layer in sparse else dense) for layer in range(layers)]
    return decoder(r, blocks, tied=False)


def minimax_m2(r: ConfigReader) -> Model:
    """MiniMax-M2: full attention normalised over the full width, 256 experts with the selection bias."""
    note_prediction_layers(r, "num_mtp_modules")
    r.ignore("use_mtp", "mtp_transformer_layers", "shared_intermediate_size", "attn_type_list")
    attention = grouped_attention(r)
    kind = r.text("qk_norm_type", default="per_layer")
    if kind != "per_layer":
        r.fault("M005", "qk_norm_type is not modelled", "qk_norm_type", "modelled: per_layer")
    if r.flag("use_qk_norm", default=True):
        attention = normed_full_width(attention)
    moe = _mixture(r, "num_local_experts", router_bias=r.flag("use_routing_bias", default=True))
    return decoder(r, [block(attention, moe)] * r.layers(), tied=False)


def step3(r: ConfigReader) -> Model:
    """Step-3's text model: queries from a compressed width over one key-value head, one shared expert."""
    layers = r.layers()
    attention = grouped_attention(
        r,
        kv_heads=r.int("num_attention_groups", default=1),
        head_dim=256,
        q_lora_rank=r.int("share_q_dim"),
    )
    r.ignore("num_key_value_heads", "use_mfa", "use_moe", "num_experts", "num_experts_per_tok", "max_seq_len")
    r.ignore("moe_layer_offset", "moe_every_n_layer", "att_impl_type")
    experts, top_k = experts_of(r, "moe_num_experts", top_k_keys=("moe_top_k",))
    act = r.activation("hidden_act", default="silu")
    moe = Moe(experts=experts, top_k=top_k, ffn=r.int("moe_intermediate_size"), gated=True, activation=act,
              shared_ffn=r.int("share_expert_dim", low=0))  # fmt: skip
    sparse = _step3_layers(r, layers)
    dense = gated_mlp(r)
    return decoder(r, [block(attention, moe if layer in sparse else dense) for layer in range(layers)], tied=False)


def _step3_layers(r: ConfigReader, layers: int) -> set[int]:
    """The layers with experts; the list may name more layers than a shortened model has."""
    listed = r.text("moe_layers_enum", default=",".join(map(str, range(1, layers))))
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        r.fault("M002", "moe_layers_enum must list layers, separated by commas", "moe_layers_enum")
        return set()
    return {int(word) for word in words}


def mimo_v2_flash(r: ConfigReader) -> Model:
    """MiMo-V2-Flash: windows of 128 tokens with sinks between full layers, each kind with its own key-value heads."""
    note_prediction_layers(r, "num_nextn_predict_layers")
    layers, biased = r.layers(), r.flag("attention_bias")
    full = grouped_attention(r, qkv_bias=biased, v_head_dim=r.int("v_head_dim"),
                             sinks=r.flag("add_full_attention_sink_bias"))  # fmt: skip
    heads, kv_heads = r.int("swa_num_attention_heads"), r.int("swa_num_key_value_heads")
    r.divides("swa_num_key_value_heads", "swa_num_attention_heads", kv_heads, heads)
    sliding = msgspec.structs.replace(
        full,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=r.int("swa_head_dim"),
        v_head_dim=r.int("swa_v_head_dim"),
        window=r.int("sliding_window", "sliding_window_size"),
        sinks=r.flag("add_swa_attention_sink_bias"),
    )
    r.ignore("sliding_window_size", "attention_chunk_size", "topk_method")
    slides = r.ints("hybrid_layer_pattern", length=layers) or [0] * layers
    sparse = r.ints("moe_layer_freq", length=layers) or [1] * layers
    moe = _mixture(r, "n_routed_experts", ffn="moe_intermediate_size", router_bias=True)
    moe = msgspec.structs.replace(moe, shared_ffn=moe.ffn * r.int("n_shared_experts", default=0, low=0))
    dense = gated_mlp(r)
    blocks = [block(sliding if s else full, moe if m else dense) for s, m in zip(slides, sparse, strict=True)]
    return decoder(r, blocks, tied=False)
