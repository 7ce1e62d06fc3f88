"""The fields of config.json that transformers' own config and modelling code reads, by model family.

`hf_config.finish` refuses a field of these lists that no family reader takes; what transformers ignores is harmless. A slow
test compares the lists with the installed transformers (`tests/models/test_reference_fields.py`).
"""

from __future__ import annotations

# Fields that transformers reads for every family.
EVERYWHERE = frozenset(
    """
    architectures attention_chunk_size attn_implementation chunk_size_feed_forward dtype experts_implementation head_dim
    hidden_size id2label is_causal is_encoder_decoder kv_sharing_modes label2id layer_types max_position_embeddings
    name_or_path num_attention_heads num_hidden_layers num_labels number_of_conv_states original_max_position_embeddings
    output_attentions output_hidden_states partial_rotary_factor per_layer_config problem_type return_dict rope_parameters
    rope_scaling rope_theta sliding_window torch_dtype transformers_version
    """.split()
)
# Fields that it reads for one family, by `model_type`.
BY_FAMILY = {
    "llama": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size mlp_bias
        num_key_value_heads pad_token_id pretraining_tp rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "mistral": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_key_value_heads
        pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "ministral": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_key_value_heads
        pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "ministral3": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_key_value_heads
        pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "mistral4": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id first_k_dense_replace hidden_act initializer_range
        intermediate_size kv_lora_rank moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
        num_experts_per_tok num_key_value_heads num_local_experts output_router_logits pad_token_id pretraining_tp q_lora_rank
        qk_head_dim qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_interleave routed_scaling_factor tie_word_embeddings
        topk_group use_cache v_head_dim vocab_size
        """.split()
    ),
    "mixtral": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_experts
        num_experts_per_tok num_key_value_heads num_local_experts output_router_logits pad_token_id rms_norm_eps
        router_aux_loss_coef router_jitter_noise tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "qwen2": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size max_window_layers
        num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache use_sliding_window vocab_size
        """.split()
    ),
    "qwen2_moe": frozenset(
        """
        attention_dropout bos_token_id decoder_sparse_step eos_token_id hidden_act initializer_range intermediate_size
        max_window_layers mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
        num_key_value_heads output_router_logits pad_token_id qkv_bias rms_norm_eps router_aux_loss_coef
        shared_expert_intermediate_size tie_word_embeddings use_cache use_sliding_window vocab_size
        """.split()
    ),
    "qwen3": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        max_window_layers num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache use_sliding_window
        vocab_size
        """.split()
    ),
    "qwen3_moe": frozenset(
        """
        attention_bias attention_dropout bos_token_id decoder_sparse_step eos_token_id hidden_act initializer_range
        intermediate_size mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
        num_key_value_heads output_router_logits pad_token_id rms_norm_eps router_aux_loss_coef tie_word_embeddings use_cache
        use_sliding_window vocab_size
        """.split()
    ),
    "gemma2": frozenset(
        """
        attention_bias attention_dropout attn_logit_softcapping bos_token_id eos_token_id final_logit_softcapping
        hidden_activation initializer_range intermediate_size num_key_value_heads pad_token_id query_pre_attn_scalar
        rms_norm_eps tie_word_embeddings use_bidirectional_attention use_cache vocab_size
        """.split()
    ),
    "gemma3_text": frozenset(
        """
        attention_bias attention_dropout attn_logit_softcapping bos_token_id eos_token_id final_logit_softcapping
        hidden_activation initializer_range intermediate_size num_key_value_heads pad_token_id query_pre_attn_scalar
        rms_norm_eps rope_local_base_freq sliding_window_pattern tie_word_embeddings use_bidirectional_attention use_cache
        vocab_size
        """.split()
    ),
    "gemma4_text": frozenset(
        """
        attention_bias attention_dropout attention_k_eq_v bos_token_id enable_moe_block eos_token_id final_logit_softcapping
        global_head_dim hidden_activation hidden_size_per_layer_input initializer_range intermediate_size
        moe_intermediate_size num_experts num_global_key_value_heads num_key_value_heads num_kv_shared_layers pad_token_id
        rms_norm_eps standardize tie_word_embeddings top_k_experts use_bidirectional_attention use_cache use_clipped_linears
        use_double_wide_mlp vocab_size vocab_size_per_layer_input
        """.split()
    ),
    "glm4": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "gpt_oss": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_experts
        num_experts_per_tok num_key_value_heads num_local_experts output_router_logits pad_token_id rms_norm_eps
        router_aux_loss_coef swiglu_alpha swiglu_limit tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "olmo2": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "olmo3": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "phi3": frozenset(
        """
        attention_dropout bos_token_id embd_pdrop eos_token_id hidden_act initializer_range intermediate_size
        num_key_value_heads pad_token_id resid_pdrop rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "deepseek_v2": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id first_k_dense_replace hidden_act initializer_range
        intermediate_size kv_lora_rank mlp_bias moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
        num_experts num_experts_per_tok num_key_value_heads output_router_logits pad_token_id pretraining_tp q_lora_rank
        qk_head_dim qk_nope_head_dim qk_rope_head_dim rms_norm_eps routed_scaling_factor tie_word_embeddings topk_group
        topk_method use_cache v_head_dim vocab_size
        """.split()
    ),
    "deepseek_v3": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id first_k_dense_replace hidden_act initializer_range
        intermediate_size kv_lora_rank moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
        num_experts_per_tok num_key_value_heads num_local_experts num_mtp_layers output_router_logits pad_token_id
        pretraining_tp q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_interleave
        routed_scaling_factor tie_word_embeddings topk_group use_cache v_head_dim vocab_size
        """.split()
    ),
    "kimi_k2": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id first_k_dense_replace hidden_act initializer_range
        intermediate_size kv_lora_rank moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
        num_experts_per_tok num_key_value_heads num_local_experts num_mtp_layers output_router_logits pad_token_id
        pretraining_tp q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_interleave
        routed_scaling_factor tie_word_embeddings topk_group use_cache v_head_dim vocab_size
        """.split()
    ),
    "glm4_moe": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id first_k_dense_replace hidden_act initializer_range
        intermediate_size moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
        num_key_value_heads num_local_experts num_mtp_layers output_router_logits pad_token_id rms_norm_eps
        routed_scaling_factor tie_word_embeddings topk_group use_cache use_qk_norm vocab_size
        """.split()
    ),
    "glm4_moe_lite": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size kv_lora_rank
        mlp_layer_types moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
        num_key_value_heads num_local_experts output_router_logits pad_token_id pretraining_tp q_lora_rank qk_head_dim
        qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_interleave routed_scaling_factor tie_word_embeddings topk_group
        use_cache v_head_dim vocab_size
        """.split()
    ),
    "minimax_m2": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_experts
        num_experts_per_tok num_key_value_heads num_local_experts output_router_logits pad_token_id rms_norm_eps rotary_dim
        router_aux_loss_coef router_jitter_noise tie_word_embeddings use_cache vocab_size
        """.split()
    ),
}
