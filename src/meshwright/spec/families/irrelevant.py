"""Configuration keys that are known and do not change a model's shape: silently accepted, never reported."""

from __future__ import annotations

from typing import Any

# Beginnings and endings that mark whole groups: rotary settings, token ids, dropout, initialisation.
_STARTS = ("_", "rope_", "rotary_", "init_", "summary_")
_ENDS = (
    *("_theta", "_token_id", "_token_ids", "_token", "_token_index", "_eps", "_epsilon", "_init", "_std", "_dtype"),
    *("dropout", "dropout_prob", "dropout_rate", "_drop", "_pdrop", "jitter_noise", "jitter_eps", "_loss_coef"),
)

_KEYS = frozenset(
    """
    architectures model_type name model_arch transformers_version torch_dtype dtype auto_map use_cache pretraining_tp
    quantization_config compression_config attn_implementation tokenizer_class task_specific_params id2label label2id
    problem_type num_labels return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    output_router_logits output_past torchscript tf_legacy_loss use_bfloat16 pruned_heads is_decoder
    add_cross_attention is_encoder_decoder cross_attention_hidden_size finetuning_task prefix
    chunk_size_feed_forward tie_encoder_decoder remove_invalid_values gradient_checkpointing layerdrop
    keys_to_ignore_at_inference bad_words_ids begin_suppress_tokens suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences repetition_penalty temperature
    top_k top_p typical_p license language for_llm_compressor ignore_index initializer_range expert_dtype
    skip_bias_add skip_bias_add_qkv slow_but_exact attention_softmax_in_fp32 scale_attention_softmax_in_fp32
    scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn masked_softmax_fusion
    bias_dropout_fusion offset_alibi attn_pdrop embd_pdrop resid_pdrop drop_tks
    vision_config audio_config vision_soft_tokens_per_image mm_tokens_per_image image_placeholder
    projector_hidden_act partial_rotary_factor original_max_position_embeddings initial_context_length
    query_pre_attn_scalar attention_value_scale final_logit_softcapping attn_logit_softcapping
    embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale attn_scale floor_scale
    attn_temperature_tuning use_bidirectional_attention use_mrope use_logn_attn indexer_rope_interleave
    norm_topk_prob scoring_func topk_group n_group routed_scaling_factor aux_loss_alpha seq_aux ep_size
    moe_router_scaling_factor norm_expert_weight moe_router_activation swiglu_limit swiglu_alpha
    index_share_for_mtp_iteration
    """.split()  # noqa: SIM905  one word a line would be 140 lines
)


def is_irrelevant(key: Any) -> bool:
    """Whether a key is known and leaves the model's shape alone; keys that begin with ``_`` are remarks."""
    return isinstance(key, str) and (key in _KEYS or key.startswith(_STARTS) or key.endswith(_ENDS))
