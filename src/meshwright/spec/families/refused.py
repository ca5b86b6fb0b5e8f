"""Architectures that are known and not modelled, with the part that is missing: refused by name."""

from __future__ import annotations

_ENCODER_DECODER = "its variant of encoder and decoder, whose names and norms differ from T5 and BART"
_ENCODER = "its variant of an encoder, whose names and layers differ from BERT"

MISSING: dict[str, str] = {
    **dict.fromkeys(("mt5", "umt5", "longt5", "mbart", "pegasus", "whisper", "fsmt"), _ENCODER_DECODER),
    **dict.fromkeys(("blenderbot", "led", "marian", "m2m_100", "t5gemma"), _ENCODER_DECODER),
    "switch_transformers": _ENCODER_DECODER + ", with experts",
    "nllb_moe": _ENCODER_DECODER + ", with experts",
    "decoder_only_t5": "relative position buckets of an unpublished T5 variant",
    "albert": "layers that all share one set of weights",
    "electra": "a generator beside the discriminator",
    **dict.fromkeys(("deberta", "deberta_v2"), "attention to positions apart from contents"),
    **dict.fromkeys(("distilbert", "modernbert", "megatron_bert"), _ENCODER),
    "siglip": "an image encoder whose head pools by attention",
    "zamba": "shared transformer blocks beside Mamba-1 layers",
    "falcon_h1": "attention and state space side by side in a layer",
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
