"""Small models of published families as configurations that transformers reads too, and the plans each is tried under.

Every number in them that a family may state differs from its default, so that one that is passed over shows.
"""

from __future__ import annotations

_SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
_GEMMA = _SMALL | {"head_dim": 16, "rms_norm_eps": 1e-5, "pad_token_id": None}
_SLIDES = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

#: By the name of transformers' configuration, with what it is beside.
CONFIGS: dict[str, dict] = {
    "gemma": _GEMMA | {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma, one key-value head": _GEMMA | {"num_key_value_heads": 1, "rope_theta": 5000.0},
    "gemma2": _GEMMA
    | _SLIDES
    | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9},
    "gemma3_text": _GEMMA
    | _SLIDES
    | {
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
        },
    },
}
#: The plan of two processes that each is trained under, beside one process.
PLANS = {
    "gemma": "tp2 mb2",
    "gemma, one key-value head": "tp2 sp mb2",
    "gemma2": "tp2 mb2",
    "gemma3_text": "pp2 mb1",
}
#: A second one.
MORE = {"gemma2": "cp2 mb2", "gemma3_text": "fsdp dp2 mb1", "gemma": "dp2 mb1 full"}
