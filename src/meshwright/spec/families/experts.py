"""Decoders whose MLPs are mixtures of experts over grouped-query attention.

Mixtral (Jiang et al. 2024, 2401.04088).
"""

from __future__ import annotations

from meshwright.spec.architecture import Model
from meshwright.spec.families.parts import decoder, grouped_attention, windows, with_window
from meshwright.spec.families.reader import Reader
from meshwright.spec.layers import Attention, Block, Dense, Moe


def rms_block(attention: Attention, mlp: Dense | Moe, *, norms: int = 2) -> Block:
    """A block with `norms` RMSNorms."""
    return Block(attention=attention, mlp=mlp, norm="rmsnorm", norms=norms, norm_vectors=1)


def experts_of(r: Reader, *count_keys: str) -> tuple[int, int]:
    """The number of routed experts and how many of them each token takes."""
    experts = r.int(*count_keys)
    top_k = r.int("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_top_k")
    r.at_most("num_experts_per_tok", count_keys[0], top_k, experts)
    return experts, top_k


def mixtral(r: Reader) -> Model:
    """Mixtral: every MLP is a mixture."""
    attention = grouped_attention(r)
    experts, top_k = experts_of(r, "num_local_experts", "num_experts")
    moe = Moe(
        experts=experts,
        top_k=top_k,
        ffn=r.int("intermediate_size"),
        gated=True,
        activation=r.text("hidden_act", default="silu"),
    )
    layers = r.layers()
    return decoder(r, [rms_block(with_window(attention, w), moe) for w in windows(r, layers)], tied=False)
