"""The config.json files of published checkpoints, as they were published, are read with the right values."""

import math
from dataclasses import replace

import pytest

from icejax.cache.registry import Clustered, layer_policies, warn_unused
from icejax.config import ExpertForm, Experts, Latent, Rope, RopeScaling
from icejax.models.hf.hf_config import SIGMOID, SOFTMAX
from icejax.models.registry import family

COMMON = dict(
    attention_dropout=0.0, hidden_act="silu", initializer_range=0.02, use_cache=True, torch_dtype="bfloat16",
    transformers_version="4.43.0", bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def sizes(hidden, inner, layers, heads, kv_heads, vocabulary, context, **fields):
    return COMMON | dict(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=context, rms_norm_eps=1e-5,
    ) | fields  # fmt: skip


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
QWEN = dict(model_type="qwen2", max_window_layers=28, use_sliding_window=False, sliding_window=131072)
LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
DEEPSEEK_YARN = dict(
    type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096
)
DEEPSEEK_V3 = LATENT | dict(
    q_lora_rank=1536, attention_bias=False, auto_map={}, ep_size=1, moe_intermediate_size=2048, moe_layer_freq=1,
    n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, rope_theta=10000, scoring_func="sigmoid",
    tie_word_embeddings=False, topk_method="noaux_tc",
)  # fmt: skip
PUBLISHED = {
    "Llama-3.1-8B-Instruct": (
        sizes(4096, 14336, 32, 32, 8, 128256, 131072, model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False,
              mlp_bias=False, pretraining_tp=1, rope_scaling=LLAMA3, rope_theta=500000.0, tie_word_embeddings=False,
              eos_token_id=[128001, 128008, 128009]),
        dict(head_dim=128, rope_theta=5e5, context_length=131072, eos_token_ids=(128001, 128008, 128009)),
    ),
    "LongChat-7B-v1.5-32k": (
        sizes(4096, 11008, 32, 32, 32, 32000, 4096, model_type="llama", pad_token_id=0, rope_scaling={"factor": 8.0, "type": "linear"},
              _name_or_path="llama-2-7b"),
        dict(num_key_value_heads=32, context_length=32768),
    ),
    "DeepSeek-R1-Distill-Qwen-7B": (
        sizes(3584, 18944, 28, 28, 4, 152064, 131072, **QWEN, use_mrope=False, rope_theta=10000, tie_word_embeddings=False),
        dict(qkv_bias=True, sliding_window=None, rope_theta=1e4),
    ),
    "Qwen2.5-7B-Instruct": (
        sizes(3584, 18944, 28, 28, 4, 152064, 32768, **QWEN, rope_theta=1000000.0, tie_word_embeddings=False),
        dict(qkv_bias=True, o_bias=False, rope_theta=1e6),
    ),
    "Qwen3-8B": (
        sizes(4096, 12288, 36, 32, 8, 151936, 40960, model_type="qwen3", attention_bias=False, head_dim=128, max_window_layers=36,
              rope_scaling=None, rope_theta=1000000, sliding_window=None, use_sliding_window=False, tie_word_embeddings=False),
        dict(qk_norm="head", head_dim=128, qkv_bias=False),
    ),
    "Qwen3-30B-A3B": (
        sizes(2048, 6144, 48, 32, 4, 151936, 40960, model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=128,
              max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
              num_experts_per_tok=8, output_router_logits=False, rope_scaling=None, rope_theta=1000000.0,
              router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False),
        dict(qk_norm="head", head_dim=128, experts=Experts(count=128, chosen=8, size=768, routing=SOFTMAX, shared=0, shared_gated=False), dense_layers=()),
    ),
    "Qwen1.5-MoE-A2.7B": (
        sizes(2048, 5632, 24, 16, 16, 151936, 8192, model_type="qwen2_moe", decoder_sparse_step=1, max_window_layers=21,
              moe_intermediate_size=1408, norm_topk_prob=False, num_experts=60, num_experts_per_tok=4, output_router_logits=False,
              rope_theta=1000000.0, router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, sliding_window=32768,
              tie_word_embeddings=False, use_sliding_window=False),
        dict(qkv_bias=True, experts=Experts(count=60, chosen=4, size=1408, routing=replace(SOFTMAX, normalised=False), shared=5632, shared_gated=True), sliding_window=None),
    ),
    "GLM-4.5-Air": (
        sizes(4096, 10944, 46, 96, 8, 151552, 131072, model_type="glm4_moe", attention_bias=True, head_dim=128, pad_token_id=151329,
              partial_rotary_factor=0.5, moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1, norm_topk_prob=True,
              num_experts_per_tok=8, first_k_dense_replace=1, n_group=1, topk_group=1, num_nextn_predict_layers=1, use_qk_norm=False,
              rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.0, tie_word_embeddings=False),
        dict(
            qkv_bias=True, qk_norm=None, rotary_dim=64, dense_layers=(0,),
            experts=Experts(
                count=128, chosen=8, size=1408, shared=1408, shared_gated=False,
                routing=SIGMOID,
            ),
        ),
    ),
    "Gemma-2-9B-it": (
        sizes(3584, 14336, 42, 16, 8, 256000, 8192, model_type="gemma2", architectures=["Gemma2ForCausalLM"], attention_bias=False,
              attn_logit_softcapping=50.0, cache_implementation="hybrid", eos_token_id=1, final_logit_softcapping=30.0, head_dim=256,
              hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", pad_token_id=0, query_pre_attn_scalar=256,
              rope_theta=10000.0, sliding_window=4096, sliding_window_size=4096),
        dict(layer_types=("sliding_attention", "full_attention") * 21, tie_word_embeddings=True, norm="offset", qk_norm=None,
             attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=256, hidden_act="gelu_pytorch_tanh"),
    ),
    "Gemma-3-27B-it": (
        dict(model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], boi_token_index=255999, eoi_token_index=256000,
             eos_token_id=[1, 106], image_token_index=262144, initializer_range=0.02, mm_tokens_per_image=256, torch_dtype="bfloat16",
             transformers_version="4.50.0.dev0", vision_config={"model_type": "siglip_vision_model"},
             text_config=dict(head_dim=128, hidden_size=5376, intermediate_size=21504, model_type="gemma3_text",
                              num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16, query_pre_attn_scalar=168,
                              rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024)),
        dict(vocab_size=262208, rope_theta=1e6, context_length=131072, tie_word_embeddings=True, eos_token_ids=(1, 106),
             dtype="bfloat16", layer_types=tuple((["sliding_attention"] * 5 + ["full_attention"]) * 11)[:62],
             sliding_rope=Rope(size=128, theta=1e4, scaling=None)),
    ),
    "GLM-4-9B-0414": (
        sizes(4096, 13696, 40, 32, 2, 151552, 32768, model_type="glm4", attention_bias=False, head_dim=128, partial_rotary_factor=0.5,
              pad_token_id=151329, rope_theta=10000.0, tie_word_embeddings=False, eos_token_id=[151329, 151336, 151338]),
        dict(rotary_dim=64, rope_interleave=True, norm_places="both", qkv_bias=False),
    ),
    "gpt-oss-20b": (  # without its quantization_config
        sizes(2880, 2880, 24, 64, 8, 201088, 131072, model_type="gpt_oss", attention_bias=True, experts_per_token=4, head_dim=64,
              initial_context_length=4096, layer_types=["sliding_attention", "full_attention"] * 12, num_experts_per_tok=4,
              num_local_experts=32, output_router_logits=False, pad_token_id=199999, rope_theta=150000, router_aux_loss_coef=0.9,
              rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                                rope_type="yarn", truncate=False),
              sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False, eos_token_id=200002),
        dict(sinks=True, rope_theta=1.5e5, sliding_window=128, qkv_bias=True, o_bias=True, experts=Experts(
            count=32, chosen=4, size=2880, routing=replace(SOFTMAX, biased=True), shared=0, shared_gated=False,
            form=ExpertForm(limit=7.0, alpha=1.702, biased=True),
        )),
    ),
    "OLMo-2-1124-7B": (
        sizes(4096, 11008, 32, 32, 32, 100352, 4096, model_type="olmo2", attention_bias=False, pad_token_id=100277, rope_scaling=None,
              rope_theta=500000, tie_word_embeddings=False),
        dict(qk_norm="all", norm_places="after", norm="wide", rope_theta=5e5, sliding_rope=None),
    ),
    "Olmo-3-7B-Instruct": (
        sizes(4096, 11008, 32, 32, 32, 100278, 65536, model_type="olmo3", attention_bias=False, pad_token_id=100277, rope_theta=500000,
              rope_scaling=dict(attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1, factor=8.0,
                                original_max_position_embeddings=8192, rope_type="yarn"),
              sliding_window=4096, tie_word_embeddings=False, layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8),
        dict(context_length=65536, sliding_window=4096, rope_theta=5e5, sliding_rope=Rope(size=128, theta=5e5, scaling=None)),
    ),
    "Phi-3-mini-128k-instruct": (
        sizes(3072, 8192, 32, 32, 32, 32064, 131072, model_type="phi3", attention_bias=False, auto_map={}, embd_pdrop=0.0, resid_pdrop=0.0,
              original_max_position_embeddings=4096, pad_token_id=32000, rope_theta=10000.0, sliding_window=262144,
              tie_word_embeddings=False, rope_scaling=dict(type="su", short_factor=[1.1] * 48, long_factor=[2.0] * 48)),
        dict(context_length=131072, rope_scaling=RopeScaling(
            rope_type="longrope", factor=32.0, original_max_position_embeddings=4096, attention_factor=(1 + 5 / 12) ** 0.5,
            factors=(2.0,) * 48, short_factors=(1.1,) * 48,
        )),
    ),
    "Phi-4-mini-instruct": (
        sizes(3072, 8192, 32, 24, 8, 200064, 131072, model_type="phi3", attention_bias=False, embd_pdrop=0.0, full_attn_mod=1,
              interpolate_factor=1, lm_head_bias=False, mlp_bias=False, original_max_position_embeddings=4096, pad_token_id=199999,
              partial_rotary_factor=0.75, resid_pdrop=0.0, rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=True,
              rope_scaling=dict(type="longrope", short_factor=[1.0] * 48, long_factor=[2.0] * 48)),
        dict(rotary_dim=96, tie_word_embeddings=True),
    ),
    "DeepSeek-V2-Lite": (
        sizes(2048, 10944, 27, 16, 16, 102400, 163840, model_type="deepseek_v2", **LATENT, q_lora_rank=None, aux_loss_alpha=0.001,
              attention_bias=False, auto_map={}, ep_size=1, first_k_dense_replace=1, moe_intermediate_size=1408, moe_layer_freq=1,
              n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, pretraining_tp=1,
              rope_scaling=DEEPSEEK_YARN | dict(mscale=0.707, mscale_all_dim=0.707), rope_theta=10000, routed_scaling_factor=1.0,
              scoring_func="softmax", seq_aux=True, tie_word_embeddings=False, topk_group=1, topk_method="greedy"),
        dict(
            head_dim=576, num_key_value_heads=1, rotary_dim=64, rope_interleave=True, value_dim=512, dense_layers=(0,), context_length=163840,
            latent=Latent(kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, v_head_dim=128),
            experts=Experts(count=64, chosen=6, size=1408, routing=replace(SOFTMAX, group_best=1, normalised=False), shared=2816, shared_gated=False),
        ),
    ),
    "DeepSeek-V3": (  # without its quantization_config
        sizes(7168, 18432, 61, 128, 128, 129280, 163840, model_type="deepseek_v3", **DEEPSEEK_V3, n_routed_experts=256,
              n_group=8, topk_group=4, first_k_dense_replace=3, num_nextn_predict_layers=1, routed_scaling_factor=2.5,
              rope_scaling=DEEPSEEK_YARN),
        dict(
            head_dim=576, num_key_value_heads=1, rotary_dim=64, rope_interleave=True, value_dim=512, dense_layers=(0, 1, 2),
            latent=Latent(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128),
            experts=Experts(
                count=256, chosen=8, size=2048, shared=2048, shared_gated=False,
                routing=replace(SIGMOID, groups=8, chosen_groups=4, factor=2.5),
            ),
        ),
    ),
    "Kimi-K2-Instruct": (  # without its quantization_config
        sizes(7168, 18432, 61, 64, 64, 163840, 131072, model_type="kimi_k2", **DEEPSEEK_V3, n_routed_experts=384, n_group=1,
              topk_group=1, first_k_dense_replace=1, num_nextn_predict_layers=0, routed_scaling_factor=2.827, aux_loss_alpha=0.001,
              rope_scaling=DEEPSEEK_YARN | dict(beta_fast=1.0, factor=32.0), seq_aux=True),
        dict(
            head_dim=576, value_dim=512, dense_layers=(0,),
            experts=Experts(
                count=384, chosen=8, size=2048, shared=2048, shared_gated=False, routing=replace(SIGMOID, factor=2.827),
            ),
        ),
    ),
    "GLM-4.7-Flash": (
        sizes(2048, 10240, 47, 20, 20, 154880, 202752, model_type="glm4_moe_lite", attention_bias=False, first_k_dense_replace=1,
              kv_lora_rank=512, moe_intermediate_size=1536, n_group=1, n_routed_experts=64, n_shared_experts=1, norm_topk_prob=True,
              num_experts_per_tok=4, num_nextn_predict_layers=1, partial_rotary_factor=1.0, q_lora_rank=768, qk_nope_head_dim=192,
              qk_rope_head_dim=64, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8, tie_word_embeddings=False,
              topk_group=1, topk_method="noaux_tc", v_head_dim=256),
        dict(
            head_dim=576, value_dim=512, rotary_dim=64, dense_layers=(0,), rope_theta=1e6,
            latent=Latent(kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256),
            experts=Experts(count=64, chosen=4, size=1536, shared=1536, shared_gated=False, routing=replace(SIGMOID, factor=1.8)),
        ),
    ),
    "MiniMax-M2.5": (  # without its quantization_config
        sizes(3072, 1536, 62, 48, 8, 200064, 196608, model_type="minimax_m2", head_dim=128, attn_type_list=[1] * 62,
              mtp_transformer_layers=1, num_experts_per_tok=8, num_local_experts=256, num_mtp_modules=3, qk_norm_type="per_layer",
              rope_theta=5000000, rotary_dim=64, scoring_func="sigmoid", shared_intermediate_size=0, tie_word_embeddings=False,
              use_mtp=True, use_qk_norm=True, use_routing_bias=True),
        dict(
            qk_norm="all", rotary_dim=64, rope_theta=5e6,
            experts=Experts(count=256, chosen=8, size=1536, routing=SIGMOID, shared=0, shared_gated=False),
        ),
    ),
    "Mistral-7B-Instruct-v0.1": (
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, model_type="mistral", rope_theta=10000.0, sliding_window=4096),
        dict(sliding_window=4096, layer_types=("sliding_attention",) * 32),
    ),
    "Mistral-7B-Instruct-v0.2": (
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, model_type="mistral", rope_theta=1000000.0, sliding_window=None),
        dict(sliding_window=None, layer_types=("full_attention",) * 32),
    ),
    "Mistral-Nemo-Instruct-2407": (
        sizes(5120, 14336, 40, 32, 8, 131072, 131072, model_type="mistral", head_dim=128, rope_theta=1000000.0, sliding_window=None),
        dict(head_dim=128, hidden_size=5120),
    ),
    "Mixtral-8x7B-Instruct-v0.1": (
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, model_type="mixtral", num_experts_per_tok=2, num_local_experts=8,
              output_router_logits=False, rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None,
              tie_word_embeddings=False),
        dict(sliding_window=None, rope_theta=1e6, experts=Experts(count=8, chosen=2, size=14336, routing=SOFTMAX, shared=0, shared_gated=False)),
    ),
    "Ministral-8B-Instruct-2410": (
        sizes(4096, 12288, 36, 32, 8, 131072, 32768, model_type="mistral", head_dim=128, rope_theta=100000000.0, sliding_window=32768),
        dict(sliding_window=32768),
    ),
}  # fmt: skip


def test_scores_of_deepseek_grow_with_the_scaling():
    """By the square of 0.1 mscale_all_dim ln(factor) + 1; where mscale equals mscale_all_dim, cos and sin are not scaled."""
    lite, large = (family(raw).read_config(raw) for raw in (PUBLISHED[n][0] for n in ("DeepSeek-V2-Lite", "DeepSeek-V3")))
    for config, factor in ((lite, (0.0707 * math.log(40) + 1) ** 2), (large, (0.1 * math.log(40) + 1) ** 2)):
        assert config.rope_scaling.attention_factor == 1.0
        assert [layer.scale for layer in config.layers] == pytest.approx([192**-0.5 * factor] * len(config.layers))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read(name):
    raw, expected = PUBLISHED[name]
    config = family(raw).read_config(raw)
    assert {field: getattr(config, field) for field in expected} == expected


def test_window_as_large_as_the_run_keeps_the_clustered_cache(caplog):
    policy = Clustered()
    ministral, mistral = (
        family(raw).read_config(raw)
        for raw in (PUBLISHED[n][0] for n in ("Ministral-8B-Instruct-2410", "Mistral-7B-Instruct-v0.1"))
    )
    assert layer_policies(policy, ministral, capacity=32768).count(policy) == 34  # the first two are dense
    warn_unused(policy, layer_policies(policy, ministral, capacity=32768))
    assert not caplog.records
    by_layer = layer_policies(policy, mistral, capacity=8192)
    warn_unused(policy, by_layer)
    assert policy not in by_layer
    assert "the clustered cache is not used" in caplog.text
