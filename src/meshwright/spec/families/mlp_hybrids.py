"""Decoders whose layers mix tokens by state space or, a few of them, by attention, and have an MLP behind either.

Bamba (IBM, Princeton and UIUC 2024) and Granite 4 (IBM 2025), as transformers 5.23 reads their configurations.
"""

from __future__ import annotations

from meshwright.spec.architecture import Model
from meshwright.spec.families.experts import experts_of
from meshwright.spec.families.hybrids import block
from meshwright.spec.families.llama import gated_mlp
from meshwright.spec.families.parts import decoder, grouped_attention
from meshwright.spec.families.reader import ConfigReader, shown
from meshwright.spec.layers import Dense, Moe
from meshwright.spec.mixers import Mamba2

#: Words of configurations for the two kinds of layers, older and newer ones.
_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


def bamba(r: ConfigReader) -> Model:
    """Bamba: layers at ``attn_layer_indices`` attend, with rotations of half of each head, and all have a dense MLP."""
    layers = r.layers()
    places = r.ints("attn_layer_indices") or []
    r.ignore("attn_rotary_emb", "partial_rotary_factor", "rope_parameters", "num_logits_to_keep", "z_loss_coefficient")
    r.ignore("mlp_bias")
    if any(place >= layers for place in places):
        r.fault("M003", f"attn_layer_indices names a layer beyond num_hidden_layers={layers}", "attn_layer_indices")
    biased = r.flag("attention_bias")
    mixer, mlp = _mixer(r), gated_mlp(r)
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased)
    made = {True: block(attention=attention, mlp=mlp), False: block(mixer=mixer, mlp=mlp)}
    return decoder(r, [made[layer in places] for layer in range(layers)], tied=False)


def granite_hybrid(r: ConfigReader) -> Model:
    """Granite 4: attention without positions in few layers, and everywhere an MLP that all tokens pass, beside a
    mixture in its larger models."""
    layers = r.layers()
    listed = r.config.get("layer_types", r.config.get("layers_block_type"))
    r.ignore("layer_types", "layers_block_type")
    words = listed if isinstance(listed, list) else ["mamba"] * layers
    words = [word if isinstance(word, str) else shown(word) for word in words]
    if len(words) != layers:
        r.fault("M003", f"num_hidden_layers={layers} and layer_types has {len(words)} layers", "layer_types")
    strange = [word for word in words if word not in _KINDS]
    if strange:
        known = ", ".join(_KINDS)
        r.fault("M005", f"layer_types has layers that are not modelled: {strange[0]!r:.40}", "layer_types", known)
    r.ignore("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    r.ignore("normalization_function", "init_method", "rope_parameters")
    biased = r.flag("attention_bias")
    rotary = r.text("position_embedding_type", default="nope") == "rope"
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased, rotary=rotary)
    made = {
        "attention": block(attention=attention, mlp=_granite_mlp(r)),
        "mamba": block(mixer=_mixer(r), mlp=_granite_mlp(r)),
    }
    return decoder(r, [made[_KINDS.get(word, "mamba")] for word in words], tied=False)


def _granite_mlp(r: ConfigReader) -> Dense | Moe:
    act, shared = r.activation("hidden_act", default="silu"), r.int("shared_intermediate_size", default=1024)
    if not r.int("num_local_experts", default=8, low=0):
        r.ignore("intermediate_size", "num_experts_per_tok")
        return Dense(ffn=shared, gated=True, activation=act)
    experts, top_k = experts_of(r, "num_local_experts")
    ffn = r.int("intermediate_size")
    return Moe(experts=experts, top_k=top_k, ffn=ffn, gated=True, activation=act, shared_ffn=shared)


def _mixer(r: ConfigReader) -> Mamba2:
    """State-space layers whose heads share the expanded width evenly where their own is ``auto``."""
    heads = r.int("mamba_n_heads", default=128)
    inner = r.int("mamba_expand", default=2) * r.int("hidden_size")
    r.divides("mamba_n_heads", "hidden_size", heads, inner)
    if r.config.get("mamba_d_head", "auto") == "auto":
        width = max(1, inner // heads)
        r.ignore("mamba_d_head")
    else:
        width = r.int("mamba_d_head")
        if width * heads != inner:
            said = f"mamba_d_head={width} * mamba_n_heads={heads} is not mamba_expand * hidden_size = {inner}"
            r.fault("M003", said, "mamba_d_head")
    groups = r.int("mamba_n_groups", default=1)
    r.divides("mamba_n_groups", "mamba_n_heads", groups, heads)
    r.ignore("mamba_dt_rank", "use_mamba_kernels", "time_step_limit")
    return Mamba2(
        heads=heads,
        head_dim=width,
        state=r.int("mamba_d_state", default=256),
        groups=groups,
        kernel=r.int("mamba_d_conv", default=4),
        chunk=r.int("mamba_chunk_size", default=256),
        bias=r.flag("mamba_proj_bias"),
        conv_bias=r.flag("mamba_conv_bias", default=True),
    )
