"""Gemma: wide heads, GELU gates, tied embeddings of a large vocabulary, and from Gemma 2 windows and four norms.

Gemma (2403.08295), Gemma 2 (2408.00118), Gemma 3 (2503.19786), and Gemma 4 (Google 2026), whose global layers have
heads of their own and whose mixtures stand beside a dense MLP.
"""

from __future__ import annotations

import msgspec

from meshwright.spec.architecture import Model
from meshwright.spec.families.experts import experts_of
from meshwright.spec.families.llama import block, gated_mlp
from meshwright.spec.families.parts import decoder, grouped_attention, normed_per_head, windows, with_window
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.layers import Attention, Moe

_GELU = "gelu_pytorch_tanh"


def gemma(r: ConfigReader) -> Model:
    """Gemma: full attention, two norms."""
    return decoder(r, [block(_attention(r), gated_mlp(r, activation=_GELU))] * r.layers(), tied=True)


def gemma2(r: ConfigReader) -> Model:
    """Gemma 2: every second layer is full, norms before and behind attention and MLP."""
    layer_windows = windows(r, r.layers(), default_window=4096, every=2)
    attention, mlp = _attention(r), gated_mlp(r, activation=_GELU)
    return decoder(r, [block(with_window(attention, w), mlp, norms=4) for w in layer_windows], tied=True)


def gemma3(r: ConfigReader) -> Model:
    """Gemma 3: every sixth layer is full, queries and keys normalised. The keys that the published multimodal
    configurations leave out have the values of the 4B model."""
    every = r.int("sliding_window_pattern", "_sliding_window_pattern", default=6)
    layer_windows = windows(r, r.layers(), default_window=4096, every=every)
    attention = normed_per_head(_attention(r, heads=8, kv_heads=4))
    mlp = gated_mlp(r, activation=_GELU)
    blocks = [block(with_window(attention, w), mlp, norms=4) for w in layer_windows]
    length = r.int("max_position_embeddings", default=131072)
    return decoder(r, blocks, tied=True, vocab=r.int("vocab_size", default=262208), max_seq_len=length)


def gemma4(r: ConfigReader) -> Model:
    """Gemma 4 without per-layer embeddings and without shared key-value layers, which are refused."""
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if r.int(key, default=0, low=0):
            r.fault("M005", f"{key} is not modelled", key, "Gemma 4 is modelled where it is 0 (26B-A4B, 31B)")
    r.ignore("vocab_size_per_layer_input", "use_double_wide_mlp")
    layer_windows = windows(r, r.layers(), default_window=512, every=6)
    layer_windows[-1] = 0  # the last layer is full whatever the pattern says
    sliding = normed_per_head(_attention(r))
    heads, width = sliding.heads, r.int("global_head_dim", default=sliding.head_dim)
    shared = r.flag("attention_k_eq_v")
    kv_heads = r.int("num_global_key_value_heads", default=sliding.kv_heads)
    r.divides("num_global_key_value_heads", "num_attention_heads", kv_heads if shared else 1, heads)
    full = normed_per_head(
        msgspec.structs.replace(
            sliding,
            kv_heads=kv_heads if shared else sliding.kv_heads,
            head_dim=width,
            v_head_dim=width,
            key_as_value=shared,
        )
    )
    mlp, norms, scales = gated_mlp(r, activation=_GELU), 4, 0
    if r.flag("enable_moe_block"):
        experts, top_k = experts_of(r, "num_experts", top_k_keys=("top_k_experts",))
        mlp = Moe(
            experts=experts,
            top_k=top_k,
            ffn=r.int("moe_intermediate_size"),
            gated=True,
            activation=mlp.activation,
            shared_ffn=mlp.ffn,
        )
        # two norms for each of the two paths and one for their sum; the router scales its input and each expert
        norms, scales = 7, r.int("hidden_size") + experts
    else:
        r.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    blocks = [
        msgspec.structs.replace(block(with_window(sliding, w) if w else full, mlp, norms=norms), scale_params=scales)
        for w in layer_windows
    ]
    return decoder(r, blocks, tied=True)


def _attention(r: ConfigReader, *, heads: int | None = None, kv_heads: int | None = None) -> Attention:
    biased = r.flag("attention_bias")
    if kv_heads is not None:
        kv_heads = r.int("num_key_value_heads", default=kv_heads)
    attention = grouped_attention(r, heads=heads, kv_heads=kv_heads, head_dim=256, qkv_bias=biased, out_bias=biased)
    r.divides("num_key_value_heads", "num_attention_heads", attention.kv_heads, attention.heads)
    return attention
