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

_LATENT = _SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 0.9,
        "mscale_all_dim": 0.6,
    },
}

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
CONFIGS |= {
    "deepseek_v3": _LATENT | {"q_lora_rank": 24, "norm_topk_prob": True},
    "deepseek_v3, weights as they are": _LATENT
    | {"q_lora_rank": 24, "norm_topk_prob": False, "rope_interleave": False, "rope_scaling": None, "n_group": 1}
    | {"topk_group": 1},
    "deepseek_v2": _LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "attention_bias": True},
    "phi": _SMALL | {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-4},
    "phi3": _SMALL | {"sliding_window": 7, "pad_token_id": None, "partial_rotary_factor": 0.5},
    "olmo": _SMALL | {"clip_qkv": 0.3, "pad_token_id": None},
    "olmo2": _SMALL | {"rms_norm_eps": 1e-4, "pad_token_id": None},
    "olmo2, one key-value head": _SMALL | {"num_key_value_heads": 1, "pad_token_id": None},
    "olmo3": _SMALL
    | _SLIDES
    | {
        "pad_token_id": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 500.0,
                "original_max_position_embeddings": 16,
            },
        },
    },
    "olmoe": _SMALL
    | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": 0.4, "pad_token_id": None},
}
#: The plan of two processes that each is trained under, beside one process.
PLANS = {
    "gemma": "tp2 mb2",
    "gemma, one key-value head": "tp2 sp mb2",
    "gemma2": "tp2 mb2",
    "gemma3_text": "pp2 mb1",
    "deepseek_v3": "tp2 mb2",
    "deepseek_v3, weights as they are": "pp2 mb2",
    "deepseek_v2": "tp2 nosp mb2",
    "phi": "tp2 mb2",
    "phi3": "tp2 mb2",
    "olmo": "tp2 mb2",
    "olmo2": "tp2 mb2",
    "olmo2, one key-value head": "tp2 nosp mb2",
    "olmo3": "cp2 mb2",
    "olmoe": "tp2 mb2",
}
#: A second one.
MORE = {"gemma2": "cp2 mb2", "gemma3_text": "fsdp dp2 mb1", "gemma": "dp2 mb1 full"} | {
    "deepseek_v3": "dp2 ep2 mb1 selective",
    "deepseek_v2": "dp2 zero2 mb1 full",
    "deepseek_v3, weights as they are": "cp2 ulysses mb2",
    "phi": "fsdp dp2 mb1",
    "phi3": "pp2 mb1",
    "olmo": "fsdp dp2 mb1",
    "olmo2": "pp2 mb1",
    "olmoe": "dp2 zero1 mb1",
}
