"""Dense decoders of the Llama kind: pre-norm RMSNorm, rotary positions, gated MLP, no learned positions.

Llama (Touvron et al. 2023, 2302.13971; 2307.09288; 2407.21783), Mistral (2310.06825), Qwen2 (2407.10671), Qwen3
(2505.09388), Phi-3 (2404.14219), Gemma 1-3 (2403.08295, 2408.00118, 2503.19786), OLMo 2 (2501.00656), GLM-4
(2406.12793), Baichuan, InternLM, Granite, MiMo (2505.07608).
"""

from __future__ import annotations

from meshwright.spec.architecture import Model
from meshwright.spec.families.parts import (
    decoder,
    grouped_attention,
    normed_per_head,
    note_prediction_layers,
    windows,
    with_window,
)
from meshwright.spec.families.reader import ConfigReader
from meshwright.spec.layers import Attention, Block, Dense, Moe


def block(attention: Attention, mlp: Dense | Moe, *, norms: int = 2) -> Block:
    """A block with `norms` RMSNorms."""
    return Block(attention=attention, mlp=mlp, norm="rmsnorm", norms=norms, norm_vectors=1)


def gated_mlp(r: ConfigReader, *, activation: str = "silu", bias: bool = False) -> Dense:
    """The gated MLP of ``intermediate_size``."""
    act = r.activation("hidden_activation", "hidden_act", default=activation)
    return Dense(ffn=r.int("intermediate_size"), gated=True, activation=act, bias=bias)


def llama(r: ConfigReader) -> Model:
    """Llama 1-3 and the models that kept its shape (Yi, Baichuan, SmolLM, Granite)."""
    biased = r.flag("attention_bias", "bias")
    attention = grouped_attention(r, qkv_bias=biased, out_bias=biased)
    mlp = gated_mlp(r, bias=r.flag("mlp_bias"))
    return decoder(r, [block(attention, mlp)] * r.layers(), tied=False)


def internlm2(r: ConfigReader) -> Model:
    """InternLM2: Llama with one flag for the attention's biases."""
    biased = r.flag("bias")
    return decoder(
        r, [block(grouped_attention(r, qkv_bias=biased, out_bias=biased), gated_mlp(r))] * r.layers(), tied=False
    )


def mistral(r: ConfigReader) -> Model:
    """Mistral and Phi-3: Llama with a sliding window in all layers, or in those that ``layer_types`` names. A Mistral
    configuration that does not mention the window means that of the first model, 4096."""
    attention, mlp = grouped_attention(r), gated_mlp(r)
    layer_windows = windows(r, r.layers(), default_window=4096 if r.family == "mistral" else 0)
    return decoder(r, [block(with_window(attention, w), mlp) for w in layer_windows], tied=False)


def qwen2(r: ConfigReader) -> Model:
    """Qwen2 and Qwen2.5: biases on query, key and value."""
    return _qwen(r, grouped_attention(r, qkv_bias=True))


def mimo(r: ConfigReader) -> Model:
    """MiMo: Qwen2 with a switch for the biases, and layers that predict further tokens."""
    note_prediction_layers(r, "num_nextn_predict_layers")
    return _qwen(r, grouped_attention(r, qkv_bias=r.flag("attention_bias", default=True)))


def qwen3(r: ConfigReader) -> Model:
    """Qwen3: no biases, queries and keys normalised per head."""
    return _qwen(r, normed_attention(r))


def glm(r: ConfigReader) -> Model:
    """GLM-4 as GLM names it: biases on query, key and value."""
    attention = grouped_attention(r, head_dim=128, qkv_bias=r.flag("attention_bias", default=True))
    return decoder(r, [block(attention, gated_mlp(r))] * r.layers(), tied=False)


def glm4(r: ConfigReader) -> Model:
    """GLM-4-0414: norms before and behind attention and MLP."""
    attention = grouped_attention(r, head_dim=128, qkv_bias=r.flag("attention_bias"))
    return decoder(r, [block(attention, gated_mlp(r), norms=4)] * r.layers(), tied=False)


def normed_attention(r: ConfigReader) -> Attention:
    """Qwen3's attention: one RMSNorm of head width for all queries and one for all keys."""
    biased = r.flag("attention_bias")
    return normed_per_head(grouped_attention(r, qkv_bias=biased, out_bias=biased))


def qwen_windows(r: ConfigReader, layers: int) -> list[int]:
    """Qwen's window per layer: it slides from ``max_window_layers`` upwards, if at all."""
    first = r.int("max_window_layers", default=28, low=0)
    kinds = r.layer_types(layers)
    if not r.flag("use_sliding_window"):
        r.ignore("sliding_window")
        return [0] * layers
    window = r.int("sliding_window", default=4096)
    if kinds is not None:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    return [window if layer >= first else 0 for layer in range(layers)]


def _qwen(r: ConfigReader, attention: Attention) -> Model:
    mlp, layers = gated_mlp(r), r.layers()
    return decoder(r, [block(with_window(attention, w), mlp) for w in qwen_windows(r, layers)], tied=False)
