"""Architectures that are known and not modelled, with the part that is missing: refused by name."""

from __future__ import annotations

_ENCODER_DECODER = "an encoder and cross-attention beside the decoder"
_ENCODER = "an encoder: bidirectional attention and no next-token head"
_STATE_SPACE = "state-space (Mamba) layers"
_LINEAR = "linear-attention layers (gated delta rule)"

MISSING: dict[str, str] = {
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "whisper", "fsmt"), _ENCODER_DECODER),
    **dict.fromkeys(("blenderbot", "led", "marian", "m2m_100", "t5gemma"), _ENCODER_DECODER),
    "switch_transformers": _ENCODER_DECODER + ", with experts",
    "nllb_moe": _ENCODER_DECODER + ", with experts",
    "decoder_only_t5": "relative position buckets of an unpublished T5 variant",
    **dict.fromkeys(("bert", "roberta", "albert", "electra", "deberta", "distilbert", "modernbert"), _ENCODER),
    **dict.fromkeys(("deberta_v2", "xlm_roberta", "megatron_bert"), _ENCODER),
    **dict.fromkeys(("clip", "clip_text_model", "siglip", "vit"), "image encoders"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _STATE_SPACE),
    **dict.fromkeys(("nemotron_h", "jamba", "bamba", "zamba", "zamba2", "falcon_h1"), _STATE_SPACE + " in a hybrid"),
    "granitemoehybrid": _STATE_SPACE + " in a hybrid",
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _LINEAR + " in a hybrid"),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), "linear-attention layers (Kimi delta attention) in a hybrid"),
    "minimax": "linear-attention layers (lightning attention) in a hybrid",
    "minimax_text_01": "linear-attention layers (lightning attention) in a hybrid",
    "minimax_m3": "block-sparse attention with its own index heads",
    "recurrent_gemma": "recurrent (RG-LRU) layers",
    "rwkv": "recurrent (RWKV) layers",
    "lfm2": "short convolutions in place of attention",
    "deepseek_v4": "compressed attention and hyper-connections",
    "gemma3n": "per-layer embeddings, sparse activations and shared key-value layers",
    "nemotron_nas": "blocks with their own attention or none (block_configs)",
    "openmoe": "the published configuration does not say whether the head is tied",
    "step2_mini": "its layers are unpublished",
    "step3p7": "the configuration leaves out head counts of the sliding layers and attention gates",
    "step3p5": "attention gates and head counts by layer kind",
    "phi3small": "block-sparse attention",
    "chatglm": "its own key names; use the glm configuration of the same model",
}
