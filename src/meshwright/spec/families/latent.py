"""Decoders with multi-head latent attention and DeepSeek's mixtures.

DeepSeek-V2 (2405.04434), DeepSeek-V3 and R1 (2412.19437), DeepSeek-V3.2 with sparse attention (2512.02556), Kimi K2
(2507.20534), GLM-5 (Zhipu 2026), whose layers may share one indexer's choice of tokens.
"""

from __future__ import annotations

import msgspec

from meshwright.spec.architecture import Model
from meshwright.spec.families.experts import deepseek_mixtures
from meshwright.spec.families.llama import block
from meshwright.spec.families.parts import decoder, note_prediction_layers
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.layers import Attention


def latent_attention(r: ConfigReader) -> Attention:
    """Latent attention from DeepSeek's keys; ``q_lora_rank`` null projects the queries directly."""
    heads = r.int("num_attention_heads")
    rope = r.int("qk_rope_head_dim")
    biased = r.flag("attention_bias")
    r.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=r.int("qk_nope_head_dim") + rope,
        v_head_dim=r.int("v_head_dim"),
        rotary=True,
        q_lora_rank=r.int("q_lora_rank", default=0),
        kv_lora_rank=r.int("kv_lora_rank"),
        rope_head_dim=rope,
        qkv_bias=biased,
        out_bias=biased,
    )


def deepseek_v2(r: ConfigReader) -> Model:
    """DeepSeek-V2 and V2-Lite."""
    r.ignore("topk_method", "q_lora_rank")
    attention = latent_attention(r)
    return decoder(r, [block(attention, mlp) for mlp in deepseek_mixtures(r, router_bias=False)], tied=False)


def deepseek_v3(r: ConfigReader) -> Model:
    """DeepSeek-V3, R1, Kimi K2; with an indexer DeepSeek-V3.2 and GLM-5. The selection bias of the router counts, as
    in the checkpoint; the layers that predict further tokens do not."""
    note_prediction_layers(r, "num_nextn_predict_layers")
    selection_bias = r.text("topk_method", default="noaux_tc") == "noaux_tc"
    mlps = deepseek_mixtures(r, router_bias=selection_bias)
    attentions = _sparse(r, latent_attention(r), len(mlps))
    return decoder(r, [block(a, mlp) for a, mlp in zip(attentions, mlps, strict=True)], tied=False)


def _sparse(r: ConfigReader, attention: Attention, layers: int) -> list[Attention]:
    """The attention of each layer, with its own indexer, another layer's choice, or none."""
    if r.family not in ("deepseek_v32", "glm_moe_dsa"):
        return [attention] * layers
    shared = msgspec.structs.replace(attention, index_top_k=r.int("index_topk"))
    own = msgspec.structs.replace(shared, index_heads=r.int("index_n_heads"), index_head_dim=r.int("index_head_dim"))
    return [shared if kind == "shared" else own for kind in _indexer_kinds(r, layers)]


def _indexer_kinds(r: ConfigReader, layers: int) -> list[str]:
    """Which layers have an indexer of their own (``full``), and which take the last one's choice (``shared``): said
    per layer, as a pattern of F and S, or as every so many layers after an offset."""
    listed = r.words("indexer_types", length=layers, choices=("full", "shared"))
    pattern = r.text("index_topk_pattern", default="")
    every, offset = r.int("index_topk_freq", default=1), r.int("index_skip_topk_offset", default=2, low=0)
    if listed is not None:
        return listed
    if pattern and (set(pattern) - {"F", "S"} or len(pattern) != layers):
        r.fault("M003", f"index_topk_pattern must have one F or S for each of {layers} layers", "index_topk_pattern")
    elif pattern:
        return ["full" if letter == "F" else "shared" for letter in pattern]
    return ["full" if max(layer - offset + 1, 0) % every == 0 else "shared" for layer in range(layers)]
