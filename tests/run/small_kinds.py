"""Small models of the kinds beside plain decoders, as configurations that Hugging Face's classes read too."""

from __future__ import annotations

from meshwright.papers.trained import STATES
from meshwright.spec.model import Model, from_config

QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 67,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
MAMBA2 = STATES | {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 67,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 8,
    "layer_norm_epsilon": 1e-6,
    "tie_word_embeddings": True,
}
CONFIGS = {"qwen3_5": QWEN, "mamba2": MAMBA2, "bert": BERT, "t5": T5}


def model(name: str) -> Model:
    """One of the models."""
    return from_config(CONFIGS[name], name=name)
