"""GPT-2 and its open relatives: LayerNorm, plain MLP, biases.

GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020, 2005.14165).
"""

from __future__ import annotations

from meshwright.spec.architecture import Model
from meshwright.spec.families.parts import LENGTH, decoder, grouped_attention, hidden_size
from meshwright.spec.families.reader import Reader
from meshwright.spec.layers import Attention, Block, Dense


def layernorm_block(attention: Attention, mlp: Dense, *, norms: int = 2, parallel: bool = False) -> Block:
    """A block whose LayerNorms have weight and bias."""
    return Block(attention=attention, mlp=mlp, norm="layernorm", norms=norms, norm_vectors=2, parallel=parallel)


def gpt2(r: Reader) -> Model:
    """GPT-2 and GPT-3: learned positions, biases everywhere, tied embeddings."""
    attention = grouped_attention(r, grouped=False, qkv_bias=True, out_bias=True, rotary=False)
    ffn = r.int("n_inner", "intermediate_size", default=4 * hidden_size(r))
    mlp = Dense(ffn=ffn, gated=False, bias=True, activation=r.text("activation_function", default="gelu_new"))
    r.ignore("n_ctx")
    positions = r.int(*LENGTH, "n_ctx", default=1024)
    return decoder(
        r,
        [layernorm_block(attention, mlp)] * r.layers("n_layer", "num_hidden_layers"),
        tied=True,
        learned_positions=positions,
        max_seq_len=positions,
    )
