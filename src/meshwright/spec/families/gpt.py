"""GPT-2 and its open relatives: LayerNorm with bias, plain MLP of four times the width, mostly biases.

GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020, 2005.14165), SantaCoder (2301.03988), GPT-J (Wang and
Komatsuzaki 2021), GPT-NeoX (2204.06745), OPT (2205.01068), BLOOM (2211.05100), Falcon (2311.16867), MPT
(MosaicML 2023, llm-foundry).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

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
    mlp, ways = plain_mlp(r, activation="gelu_new"), r.int("parallel_ways", default=1)

    def made(block: Block, hidden: int) -> Model:
        blocks = [block] * r.layers()
        return decoder(r, blocks, tied=True, learned_positions=positions, max_seq_len=positions, hidden=hidden)

    whole = made(layernorm_block(attention, mlp), r.int("hidden_size"))
    return whole if ways == 1 else _parted(whole, made, ways)


def _parted(whole: Model, made: Callable[[Block, int], Model], ways: int) -> Model:
    """Kraken's form of a model (Prabhakar et al. 2408.07802): blocks of so many parts, each with attention, an MLP and
    a stream of its own, as wide as comes nearest to the model's parameters, in whole heads as wide as the model's. The
    paper keeps parameters about equal; this rule, with one table of tokens for all streams, is ours."""
    (block,) = whole.blocks
    attention, ratio = block.attention, block.mlp.ffn / whole.hidden
    shared = attention.kv_heads == 1

    def parted(heads: int) -> Model:
        width = heads * attention.head_dim
        kv_heads = ways * (1 if shared else heads)
        own = msgspec.structs.replace(attention, heads=ways * heads, kv_heads=kv_heads)
        dense = msgspec.structs.replace(block.mlp, ffn=ways * int(ratio * width))
        return made(msgspec.structs.replace(block, attention=own, mlp=dense, ways=ways), width)

    every = map(parted, range(1, attention.heads + 1))
    found = min(every, key=lambda model: abs(model.num_params - whole.num_params))
    return msgspec.structs.replace(
        found, notes=(*found.notes, f"{ways} streams, {found.hidden} wide by a rule of ours")
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
