"""GPT-2 and its open relatives: LayerNorm with bias, plain MLP of four times the width, mostly biases.

GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020, 2005.14165), SantaCoder (2301.03988), GPT-J (Wang and
Komatsuzaki 2021), GPT-NeoX (2204.06745), OPT (2205.01068), BLOOM (2211.05100), Falcon (2311.16867), MPT
(MosaicML 2023, llm-foundry).
"""

from __future__ import annotations

from meshwright.spec.architecture import Model
from meshwright.spec.families.parts import decoder, grouped_attention, normed_full_width
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.layers import Attention, Block, Dense


def layernorm_block(
    attention: Attention, mlp: Dense, *, norms: int = 2, norm_vectors: int = 2, parallel: bool = False
) -> Block:
    """A block with LayerNorms, by default of weight and bias."""
    return Block(
        attention=attention, mlp=mlp, norm="layernorm", norms=norms, norm_vectors=norm_vectors, parallel=parallel
    )


def plain_mlp(r: ConfigReader, *, activation: str = "gelu", bias: bool = True) -> Dense:
    """The MLP without a gate: ``intermediate_size``, or four times the width when absent."""
    ffn = r.int("intermediate_size", default=4 * r.int("hidden_size"))
    act = r.activation("hidden_act", "activation_function", "activation", default=activation)
    return Dense(ffn=ffn, gated=False, bias=bias, activation=act)


def gpt2(r: ConfigReader) -> Model:
    """GPT-2 and GPT-3: learned positions, biases everywhere, tied embeddings."""
    return _gpt2(r, grouped_attention(r, grouped=False, qkv_bias=True, out_bias=True, rotary=False))


def gpt_bigcode(r: ConfigReader) -> Model:
    """GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key-value head."""
    kv_heads = 1 if r.flag("multi_query", default=True) else r.int("num_attention_heads")
    return _gpt2(r, grouped_attention(r, kv_heads=kv_heads, qkv_bias=True, out_bias=True, rotary=False))


def _gpt2(r: ConfigReader, attention: Attention) -> Model:
    positions = r.int("max_position_embeddings", "n_ctx", default=1024)
    mlp = plain_mlp(r, activation="gelu_new")
    return decoder(
        r,
        [layernorm_block(attention, mlp)] * r.layers(),
        tied=True,
        learned_positions=positions,
        max_seq_len=positions,
    )


def gptj(r: ConfigReader) -> Model:
    """GPT-J: rotary, attention without biases beside an MLP with them, one norm for both, a head with bias."""
    block = layernorm_block(grouped_attention(r, grouped=False), plain_mlp(r), norms=1, parallel=True)
    return decoder(r, [block] * r.layers(), tied=False, head_bias=True)


def gpt_neox(r: ConfigReader) -> Model:
    """GPT-NeoX and Pythia: rotary, attention and MLP in parallel, each behind its own norm."""
    biased = r.flag("attention_bias", default=True)
    attention = grouped_attention(r, grouped=False, qkv_bias=biased, out_bias=biased)
    block = layernorm_block(attention, plain_mlp(r), parallel=r.flag("use_parallel_residual", default=True))
    return decoder(r, [block] * r.layers(), tied=False)


def opt(r: ConfigReader) -> Model:
    """OPT: GPT-2 whose position table has two rows more than its length; the 350m projects its embedding."""
    biased = r.flag("enable_bias", default=True)
    attention = grouped_attention(r, grouped=False, qkv_bias=biased, out_bias=biased, rotary=False)
    affine = r.flag("layer_norm_elementwise_affine", default=True)
    mlp = plain_mlp(r, activation="relu", bias=biased)
    block = layernorm_block(attention, mlp, norm_vectors=2 if affine else 0)
    length, hidden = r.int("max_position_embeddings", default=2048), r.int("hidden_size")
    width = r.int("word_embed_proj_dim", default=hidden)
    return decoder(
        r,
        [block] * r.layers(),
        tied=True,
        max_seq_len=length,
        learned_positions=length + 2,
        embedding_width=0 if width == hidden else width,
        final_norm=r.flag("do_layer_norm_before", default=True) and not r.flag("_remove_final_layer_norm"),
    )


def bloom(r: ConfigReader) -> Model:
    """BLOOM: ALiBi instead of positions, a norm behind the embedding."""
    attention = grouped_attention(r, grouped=False, qkv_bias=True, out_bias=True, rotary=False)
    r.ignore("apply_residual_connection_post_layernorm")
    length = r.int("seq_length", default=2048)
    block = layernorm_block(attention, plain_mlp(r))
    return decoder(r, [block] * r.layers(), tied=True, embedding_norm=True, max_seq_len=length)


def falcon(r: ConfigReader) -> Model:
    """Falcon: the 7B has one key-value head and one norm, the 40B and 180B ("new decoder") groups and two norms."""
    new = r.flag("new_decoder_architecture")
    parallel = new or r.flag("parallel_attn", default=True)
    r.ignore("parallel_attn", "multi_query", "num_key_value_heads", r.spelling["num_key_value_heads"])
    one_head = r.flag("multi_query", default=True) and not new
    biased = r.flag("bias")
    attention = grouped_attention(
        r,
        kv_heads=1 if one_head else None,
        qkv_bias=biased,
        out_bias=biased,
        rotary=not r.flag("alibi"),
    )
    norms = r.int("num_ln_in_parallel_attn", default=2 if new else 1, high=2) if parallel else 2
    block = layernorm_block(attention, plain_mlp(r, bias=biased), norms=norms, parallel=parallel)
    return decoder(r, [block] * r.layers(), tied=True)


def mpt(r: ConfigReader) -> Model:
    """MPT: ALiBi, and with ``no_bias`` not a single bias, in the norms neither."""
    inner = r.section("attn_config")
    inner.ignore("attn_impl", "attn_uses_sequence_id", "prefix_lm", "qk_gn", "softmax_scale", "clip_qkv",
                 "attn_pdrop", "alibi_bias_max", "model_type")  # fmt: skip
    biased = not r.flag("no_bias", default=True)
    vectors = 2 if biased else 1
    heads = r.int("num_attention_heads")
    kinds = {
        "multihead_attention": heads,
        "multiquery_attention": 1,
        "grouped_query_attention": inner.int("kv_n_heads", default=heads),
    }
    kind = inner.text("attn_type", default="multihead_attention")
    if kind not in kinds:
        inner.fault("M005", f"attn_type {kind!r} is not modelled", "attn_type", "modelled: " + ", ".join(kinds))
    alibi, rotary = inner.flag("alibi", default=True), inner.flag("rope")
    attention = grouped_attention(r, kv_heads=kinds.get(kind, heads), qkv_bias=biased, out_bias=biased, rotary=rotary)
    if inner.flag("qk_ln"):
        attention = normed_full_width(attention, norm_vectors=vectors)
    r.ignore("attn_impl", "emb_pdrop", "init_config", "verbose", "embedding_fraction", "norm_type", "use_cache")
    ffn = r.int("expansion_ratio", default=4) * r.int("hidden_size")
    mlp = Dense(ffn=ffn, gated=False, bias=biased, activation="gelu")
    block = layernorm_block(attention, mlp, norm_vectors=vectors)
    length = r.int("max_position_embeddings", default=2048)
    learned = r.flag("learned_pos_emb", default=True) and not alibi and not rotary
    return decoder(r, [block] * r.layers(), tied=True, max_seq_len=length, learned_positions=length if learned else 0)
