"""Decoders whose tokens meet in state-space layers or by the gated delta rule, in all layers or in most.

Mamba (2312.00752), Mamba-2 (2405.21060), Jamba (Lieber et al. 2024, 2403.19887), Zamba2 (Glorioso et al. 2024,
2411.15242), Nemotron-H (NVIDIA 2025, 2504.03624), Qwen3-Next and Qwen3.5 (Qwen 2025, 2026).
"""

from __future__ import annotations

from math import ceil
from typing import Any

from msgspec.structs import replace

from meshwright.spec.architecture import Model
from meshwright.spec.families.experts import experts_of
from meshwright.spec.families.llama import gated_mlp
from meshwright.spec.families.parts import decoder, grouped_attention, normed_per_head, note_prediction_layers
from meshwright.spec.families.reader import ConfigReader, shown
from meshwright.spec.layers import Block, Dense, Moe
from meshwright.spec.mixers import GatedDelta, Mamba, Mamba2, SharedTransformer

_LINEAR, _FULL = "linear_attention", "full_attention"


def block(**parts: Any) -> Block:
    """A block with an RMSNorm before each of its parts."""
    return Block(norm="rmsnorm", norm_vectors=1, **{"norms": len(parts), **parts})


def mamba(r: ConfigReader) -> Model:
    """Mamba and Falcon-Mamba: nothing but state-space layers; the latter normalises without learned weights."""
    hidden = r.int("hidden_size")
    layer = Mamba(
        inner=r.int("intermediate_size", default=r.int("expand", default=2) * hidden),
        state=r.int("state_size", default=16),
        dt_rank=_dt_rank(r, "time_step_rank", hidden),
        kernel=r.int("conv_kernel", default=4),
        bias=r.flag("use_bias"),
        conv_bias=r.flag("use_conv_bias", default=True),
    )
    r.ignore("time_step_scale", "time_step_init_scheme", "time_step_min", "time_step_max", "time_step_floor")
    r.ignore(
        "rescale_prenorm_residual", "residual_in_fp32", "use_mambapy", "use_falcon_mambapy", "use_associative_scan"
    )
    r.ignore("mixer_rms_eps", "fused_add_norm", "rms_norm", "hidden_act")
    return decoder(r, [block(mixer=layer)] * r.layers(), tied=r.family == "mamba")


def _dt_rank(r: ConfigReader, key: str, hidden: int) -> int:
    """The rank of the step size; ``auto`` is a sixteenth of the width."""
    if r.config.get(key, "auto") == "auto":
        r.ignore(key)
        return ceil(hidden / 16)
    return r.int(key)


def mamba2(r: ConfigReader) -> Model:
    """Mamba-2: nothing but state-space layers with heads."""
    layer = _mamba2(r, "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "use_bias", "use_conv_bias")
    r.ignore(
        "expand",
        "time_step_rank",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "norm_before_gate",
        "rms_norm",
        "hidden_act",
    )
    return decoder(r, [block(mixer=layer)] * r.layers(), tied=False)


def _mamba2(
    r: ConfigReader, heads: str, width: str, state: str, groups: str, kernel: str, bias: str, conv: str
) -> Mamba2:
    """State-space layers from a family's words for their dimensions."""
    found = Mamba2(
        heads=r.int(heads),
        head_dim=r.int(width),
        state=r.int(state, default=128),
        groups=r.int(groups, default=1),
        kernel=r.int(kernel, default=4),
        chunk=r.int("chunk_size", default=256),
        bias=r.flag(bias),
        conv_bias=r.flag(conv, default=True),
    )
    r.divides(groups, heads, found.groups, found.heads)
    r.ignore(
        "use_mamba_kernels", "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "mamba_hidden_act"
    )
    return found


def jamba(r: ConfigReader) -> Model:
    """Jamba: one layer of several is attention without positions, and every other MLP a mixture."""
    hidden, layers = r.int("hidden_size"), r.layers()
    mixer = Mamba(
        inner=r.int("mamba_expand", default=2) * hidden,
        state=r.int("mamba_d_state", default=16),
        dt_rank=_dt_rank(r, "mamba_dt_rank", hidden),
        kernel=r.int("mamba_d_conv", default=4),
        bias=r.flag("mamba_proj_bias"),
        conv_bias=r.flag("mamba_conv_bias", default=True),
        normed=True,
    )
    r.ignore(
        "use_mamba_kernels",
        "mamba_inner_layernorms",
        "sliding_window",
        "use_mambapy",
        "use_associative_scan",
        "num_logits_to_keep",
    )
    attention = grouped_attention(r, rotary=False)
    every, first = r.int("attn_layer_period", default=8), r.int("attn_layer_offset", default=4, low=0)
    moe_every, moe_first = r.int("expert_layer_period", default=2), r.int("expert_layer_offset", default=1, low=0)
    dense = gated_mlp(r)
    experts, top_k = experts_of(r, "num_experts", "num_local_experts")
    moe = Moe(experts=experts, top_k=top_k, ffn=dense.ffn, gated=True, activation=dense.activation)
    blocks = []
    for layer in range(layers):
        mlp = moe if experts > 1 and layer % moe_every == moe_first else dense
        token = {"attention": attention} if layer % every == first else {"mixer": mixer}
        blocks.append(block(**token, mlp=mlp))
    return decoder(r, blocks, tied=False)


#: Letters of Nemotron-H's pattern and the words that newer configurations have for them.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WORDS = {"linear_attention": "mamba", "full_attention": "attention"}


def nemotron_h(r: ConfigReader) -> Model:
    """Nemotron-H and Nemotron 3: every layer is one thing, state space, attention without positions, MLP or mixture."""
    note_prediction_layers(r, "num_nextn_predict_layers")
    kinds = _kinds(r)
    mixer = _mamba2(
        r, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_bias", "use_conv_bias"
    )
    r.ignore("expand", "mamba_proj_bias", "rescale_prenorm_residual", "residual_in_fp32", "time_step_rank")
    r.ignore(
        "num_logits_to_keep", "mamba_ssm_cache_dtype", "sliding_window", "moe_shared_expert_overlap", "n_shared_experts"
    )
    r.ignore("mtp_hybrid_override_pattern", "mtp_layers_block_type", "attention_head_dim", "rope_parameters")
    biased = r.flag("attention_bias")
    attention = grouped_attention(
        r, head_dim=r.int("attention_head_dim", default=128), qkv_bias=biased, out_bias=biased, rotary=False
    )
    act, bias = r.activation("mlp_hidden_act", default="relu2"), r.flag("mlp_bias")
    made: dict[str, Block] = {"mamba": block(mixer=mixer), "attention": block(attention=attention)}
    if "mlp" in kinds:
        made["mlp"] = block(mlp=Dense(ffn=r.int("intermediate_size"), gated=False, activation=act, bias=bias))
    r.ignore("intermediate_size")
    if "moe" in kinds:
        made["moe"] = block(mlp=_nemotron_mixture(r, act, bias))
    return decoder(r, [made.get(kind, made["mamba"]) for kind in kinds], tied=False)


def _kinds(r: ConfigReader) -> list[str]:
    """Return the kind of each layer, from ``hybrid_override_pattern`` or from ``layers_block_type``."""
    pattern = r.config.get("hybrid_override_pattern")
    listed = r.config.get("layers_block_type", r.config.get("layer_types"))
    r.ignore("hybrid_override_pattern", "layers_block_type", "layer_types", "num_hidden_layers")
    if isinstance(pattern, str) and pattern:
        key, found = "hybrid_override_pattern", [_LETTERS.get(letter, letter) for letter in pattern]
    elif isinstance(listed, list) and listed:
        key, found = (
            "layers_block_type",
            [_WORDS.get(word, word) if isinstance(word, str) else shown(word) for word in listed],
        )
    else:
        r.fault("M001", "hybrid_override_pattern is missing", "hybrid_override_pattern", "one of M*-E for each layer")
        return ["mamba"]
    strange = [kind for kind in found if kind not in _LETTERS.values()]
    if strange:
        known = ", ".join(f"{letter} ({word})" for letter, word in _LETTERS.items())
        r.fault("M005", f"{key} has layers that are not modelled: {strange[0]!r:.40}", key, f"modelled: {known}")
    layers = r.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers != len(found):
        r.fault("M003", f"num_hidden_layers={layers} and the pattern has {len(found)} layers", "num_hidden_layers")
    return found


def _nemotron_mixture(r: ConfigReader, act: str, bias: bool) -> Moe:
    experts, top_k = experts_of(r, "n_routed_experts")
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn=r.int("moe_intermediate_size"),
        gated=False,
        activation=act,
        shared_ffn=r.int("moe_shared_expert_intermediate_size", low=0),
        latent=r.int("moe_latent_size", default=0, low=0),
        bias=bias,
        router_bias=True,
    )


def zamba2(r: ConfigReader) -> Model:
    """Zamba2: state-space layers, and before some of them one of few transformer blocks whose weights are shared."""
    hidden, layers = r.int("hidden_size"), r.layers()
    heads = r.int("n_mamba_heads", default=8)
    inner = r.int("mamba_expand", default=2) * hidden
    r.divides("n_mamba_heads", "hidden_size", heads, inner)
    r.ignore("mamba_headdim")
    mixer = Mamba2(
        heads=heads,
        head_dim=max(1, inner // heads),
        state=r.int("mamba_d_state", default=64),
        groups=r.int("mamba_ngroups", default=1),
        kernel=r.int("mamba_d_conv", default=4),
        chunk=r.int("chunk_size", default=256),
        conv_bias=r.flag("use_conv_bias", default=True),
        bias=r.flag("add_bias_linear"),
    )
    for key in (
        "use_mamba_kernels",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "time_step_limit",
        "use_mem_eff_path",
    ):
        r.ignore(key)
    r.ignore("attention_hidden_size", "attention_head_dim", "kv_channels", "num_query_groups", "ft_lora")
    r.ignore(
        "use_shared_mlp_adapter", "use_long_context", "rope_theta", "num_logits_to_keep", "use_shared_block_adapter"
    )
    attention_heads = r.int("num_attention_heads", default=32)
    r.divides("num_attention_heads", "hidden_size", attention_heads, 2 * hidden)
    shared = SharedTransformer(
        heads=attention_heads,
        kv_heads=r.int("num_key_value_heads", default=attention_heads),
        head_dim=max(1, 2 * hidden // attention_heads),
        ffn=r.int("intermediate_size", default=4 * hidden),
        rank=r.int("adapter_rank", default=128),
        adapts_attention=r.flag("use_shared_attention_adapter"),
        activation=r.activation("hidden_act", default="gelu"),
        rotary=r.flag("use_mem_rope"),
        bias=mixer.bias,
    )
    places, groups = _places(r, layers), r.int("num_mem_blocks", default=1)
    plain = block(mixer=mixer)
    blocks = [plain] * layers
    for turn, place in enumerate(places):
        blocks[place] = replace(plain, before=(replace(shared, borrows=turn >= groups, number=turn % groups),))
    return decoder(r, blocks, tied=True)


def _places(r: ConfigReader, layers: int) -> list[int]:
    """The layers before which a shared block stands."""
    listed = r.config.get("layers_block_type")
    r.ignore("hybrid_layer_ids", "layers_block_type")
    places = r.ints("hybrid_layer_ids")
    if places is None and isinstance(listed, list):
        places = [i for i, kind in enumerate(listed) if kind == "hybrid"]
    if places is None:
        r.fault("M001", "hybrid_layer_ids is missing", "hybrid_layer_ids", "the layers that have a shared block")
        return []
    if any(place >= layers for place in places):
        r.fault("M003", f"hybrid_layer_ids names a layer beyond num_hidden_layers={layers}", "hybrid_layer_ids")
    return [place for place in places if place < layers]


def qwen3_next(r: ConfigReader) -> Model:
    """Qwen3-Next: three of four layers by the gated delta rule, the fourth attention with an output gate; mixtures."""
    return _qwen(r, _qwen_mixture(r))


def qwen3_5(r: ConfigReader) -> Model:
    """Qwen3.5: the layers of Qwen3-Next with a dense MLP."""
    note_prediction_layers(r, "mtp_num_hidden_layers")
    return _qwen(r, gated_mlp(r))


def qwen3_5_moe(r: ConfigReader) -> Model:
    """Qwen3.5 with mixtures."""
    note_prediction_layers(r, "mtp_num_hidden_layers")
    return _qwen(r, _qwen_mixture(r))


def _qwen_mixture(r: ConfigReader) -> Moe:
    experts, top_k = experts_of(r, "num_experts")
    if r.ints("mlp_only_layers"):
        r.fault("M005", "mlp_only_layers is not modelled", "mlp_only_layers", "modelled: []")
    if r.int("decoder_sparse_step", default=1) != 1:
        r.fault("M005", "decoder_sparse_step is not modelled", "decoder_sparse_step", "modelled: 1")
    r.ignore("intermediate_size")
    shared = r.int("shared_expert_intermediate_size", low=0)
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn=r.int("moe_intermediate_size"),
        gated=True,
        activation=r.activation("hidden_act", default="silu"),
        shared_ffn=shared,
        shared_gate=shared > 0,
    )


def _qwen(r: ConfigReader, mlp: Dense | Moe) -> Model:
    layers, every = r.layers(), r.int("full_attention_interval", default=4)
    kinds = r.words("layer_types", length=layers, choices=(_LINEAR, _FULL))
    kinds = kinds or [_FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(layers)]
    gated = r.flag("attn_output_gate", default=True)
    r.ignore(
        "use_sliding_window", "sliding_window", "mamba_ssm_dtype", "mtp_use_dedicated_embeddings", "rope_parameters"
    )
    r.ignore("mlp_only_layers")
    attention = replace(
        normed_per_head(grouped_attention(r, head_dim=256, qkv_bias=r.flag("attention_bias"))), gated=gated
    )
    mixer = GatedDelta(
        heads=r.int("linear_num_value_heads", default=32),
        k_heads=r.int("linear_num_key_heads", default=16),
        k_head_dim=r.int("linear_key_head_dim", default=128),
        v_head_dim=r.int("linear_value_head_dim", default=128),
        kernel=r.int("linear_conv_kernel_dim", default=4),
    )
    r.divides("linear_num_key_heads", "linear_num_value_heads", mixer.k_heads, mixer.heads)
    made = {_FULL: block(attention=attention, mlp=mlp), _LINEAR: block(mixer=mixer, mlp=mlp)}
    return decoder(r, [made[kind] for kind in kinds], tied=False)
