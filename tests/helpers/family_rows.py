"""The table of model variants under test: one row per config variant of a family, in the sizes of a tiny model."""

from __future__ import annotations

from dataclasses import dataclass

import transformers as hf

WINDOW = 32  # shorter than the prompts, so that the window counts
SIZES = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
SCALES = ("default", "fan_in")


@dataclass(frozen=True)
class Row:
    """A variant: config `changes` over SIZES; weight `scales` that run by default (other scales are slow tests)."""

    name: str
    config: type
    model: type
    changes: tuple[tuple[str, object], ...]
    scales: tuple[str, ...] = SCALES

    def __str__(self) -> str:
        return self.name


def _llama(name: str, **changes) -> Row:
    return Row("llama-" + name, hf.LlamaConfig, hf.LlamaForCausalLM, tuple(changes.items()))


def _mistral(name: str, **changes) -> Row:
    return Row("mistral-" + name, hf.MistralConfig, hf.MistralForCausalLM, tuple(changes.items()))


def _mixtral(name: str, **changes) -> Row:
    return Row("mixtral-" + name, hf.MixtralConfig, hf.MixtralForCausalLM, (("num_local_experts", 4), *changes.items()))


def _qwen2(name: str, **changes) -> Row:
    return Row("qwen2-" + name, hf.Qwen2Config, hf.Qwen2ForCausalLM, tuple(changes.items()))


def _qwen3(name: str, **changes) -> Row:
    return Row("qwen3-" + name, hf.Qwen3Config, hf.Qwen3ForCausalLM, tuple(changes.items()))


def _qwen2_moe(name: str, **changes) -> Row:
    small = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
    return Row("qwen2_moe-" + name, hf.Qwen2MoeConfig, hf.Qwen2MoeForCausalLM, tuple((small | changes).items()))


def _qwen3_moe(name: str, **changes) -> Row:
    small = dict(num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    return Row("qwen3_moe-" + name, hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, tuple((small | changes).items()))


def _glm(name: str, **changes) -> Row:
    small = dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, routed_scaling_factor=1.5)
    return Row("glm4_moe-" + name, hf.Glm4MoeConfig, hf.Glm4MoeForCausalLM, tuple((small | changes).items()))


def _gemma2(name: str, *scales: str, **changes) -> Row:
    small = dict(head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24, layer_types=TWO_TO_ONE)
    small |= dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.0)
    return Row("gemma2-" + name, hf.Gemma2Config, hf.Gemma2ForCausalLM, tuple((small | changes).items()), scales)


def _gemma3(name: str, *scales: str, **changes) -> Row:
    small = dict(head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=24, layer_types=TWO_TO_ONE)
    return Row("gemma3_text-" + name, hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, tuple((small | changes).items()), scales)


def _gemma4(name: str, *scales: str, **changes) -> Row:
    small = dict(
        head_dim=16, global_head_dim=32, sliding_window=WINDOW, layer_types=TWO_TO_ONE, hidden_size_per_layer_input=0,
        final_logit_softcapping=2.0,
    )  # fmt: skip
    return Row("gemma4_text-" + name, hf.Gemma4TextConfig, hf.Gemma4ForCausalLM, tuple((small | changes).items()), scales)


def _glm4(name: str, *scales: str, **changes) -> Row:
    return Row("glm4-" + name, hf.Glm4Config, hf.Glm4ForCausalLM, tuple(({"head_dim": 16} | changes).items()), scales)


def _gpt_oss(name: str, *scales: str, **changes) -> Row:
    small = dict(
        head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.5, swiglu_alpha=1.3,
        rope_parameters=_rope("yarn", factor=8.0, original_max_position_embeddings=64, truncate=False),
    )  # fmt: skip
    return Row("gpt_oss-" + name, hf.GptOssConfig, hf.GptOssForCausalLM, tuple((small | changes).items()), scales)


def _olmo3(name: str, *scales: str, **changes) -> Row:
    small = dict(sliding_window=WINDOW, layer_types=TWO_TO_ONE)
    return Row("olmo3-" + name, hf.Olmo3Config, hf.Olmo3ForCausalLM, tuple((small | changes).items()), scales)


def _phi3(name: str, *scales: str, **changes) -> Row:
    return Row("phi3-" + name, hf.Phi3Config, hf.Phi3ForCausalLM, tuple(changes.items()), scales)


def _minimax(name: str, **changes) -> Row:
    small = dict(num_local_experts=6, num_experts_per_tok=2, intermediate_size=16)
    return Row("minimax_m2-" + name, hf.MiniMaxM2Config, hf.MiniMaxM2ForCausalLM, tuple((small | changes).items()))


LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
)  # fmt: skip


def _deepseek_v2(name: str, **changes) -> Row:
    return Row("deepseek_v2-" + name, hf.DeepseekV2Config, hf.DeepseekV2ForCausalLM, tuple((LATENT | changes).items()), ())


def _deepseek_v3(name: str, *scales: str, **changes) -> Row:
    small = LATENT | dict(n_group=4, topk_group=2, first_k_dense_replace=1)
    return Row("deepseek_v3-" + name, hf.DeepseekV3Config, hf.DeepseekV3ForCausalLM, tuple((small | changes).items()), scales)


def _glm_lite(name: str, **changes) -> Row:
    return Row("glm4_moe_lite-" + name, hf.Glm4MoeLiteConfig, hf.Glm4MoeLiteForCausalLM, tuple((LATENT | changes).items()), ())


def _rope(rope_type: str, **fields) -> dict:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **fields}


def by_type(full: dict, sliding: dict) -> dict:
    """Returns the RoPE parameters of full and of sliding-window layers, as config.json holds them."""
    return {"full_attention": full, "sliding_attention": sliding}


SHORT, LONG = [1.0, 1.1, 1.2, 1.5, 1.9, 2.0], [1.0, 1.3, 2.5, 4.0, 6.5, 8.0]
TWO_TO_ONE = ["sliding_attention", "sliding_attention", "full_attention"]
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = (
    _llama("gqa"),
    _llama("mha", num_key_value_heads=4),
    _llama("mqa-tied", num_key_value_heads=1, tie_word_embeddings=True),
    _llama("biases", attention_bias=True, mlp_bias=True),
    _llama("head-dim", head_dim=24),
    _llama("theta-eps", rms_norm_eps=1e-3, rope_parameters=_rope("default") | {"rope_theta": 500000.0}),
    _llama("linear", rope_parameters=_rope("linear", factor=8.0)),  # LongChat
    _llama("dynamic", max_position_embeddings=64, rope_parameters=_rope("dynamic", factor=2.0)),
    _llama(
        "llama3",  # 3.1, 3.2 and DeepSeek-R1-Distill-Llama
        rope_parameters=_rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    _llama("yarn", rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    _llama(
        "yarn-mscale",
        rope_parameters=_rope(
            "yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.3, beta_fast=16.0,
            beta_slow=2.0, truncate=False,
        ),
    ),
    _mistral("window", sliding_window=WINDOW),  # v0.1
    _mistral("plain", sliding_window=None, rope_parameters=_rope("default") | {"rope_theta": 1e6}),  # v0.2, v0.3, Codestral
    _mistral("head-dim", sliding_window=None, head_dim=32),  # Nemo, Ministral-8B
    Row(
        "ministral-layer-types",
        hf.MinistralConfig,
        hf.MinistralForCausalLM,
        (("head_dim", 16), ("sliding_window", WINDOW), ("layer_types", ALTERNATING)),
    ),
    Row(
        "ministral3-plain",
        hf.Ministral3Config,
        hf.Ministral3ForCausalLM,
        (
            ("head_dim", 32),
            (
                "rope_parameters",
                _rope(
                    "yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0,
                    beta_slow=1.0, llama_4_scaling_beta=0.5, max_position_embeddings=512,
                ),
            ),
        ),
    ),
    _mixtral("plain"),  # 8x7B, 8x22B
    _mixtral("window", sliding_window=WINDOW, head_dim=32, num_experts_per_tok=1),
    _qwen2("plain"),  # 2.5 and DeepSeek-R1-Distill-Qwen too
    _qwen2("tied", tie_word_embeddings=True),
    _qwen2("window", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    _qwen2("yarn", rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    _qwen2_moe("plain"),  # 1.5-MoE-A2.7B, 57B-A14B
    _qwen2_moe(
        "dense-layers", norm_topk_prob=True, qkv_bias=False, mlp_only_layers=[1], num_experts_per_tok=3, use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    _qwen3("plain", head_dim=32),
    _qwen3("layer-types", head_dim=16, use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING),
    _qwen3("biases", head_dim=16, attention_bias=True),
    _qwen3_moe("plain", norm_topk_prob=True),  # 30B-A3B, 235B-A22B
    _qwen3_moe("dense-layers", head_dim=32, mlp_only_layers=[0], attention_bias=True),
    _minimax("plain", head_dim=32, rotary_dim=8),
    _minimax("whole-heads", head_dim=16, num_experts_per_tok=3),
    _glm("plain", attention_bias=True, routed_scaling_factor=1.0),  # 4.5-Air
    _glm("groups", head_dim=32, use_qk_norm=True, n_group=4, topk_group=2, first_k_dense_replace=0, n_shared_experts=2),
    _glm(
        "yarn", norm_topk_prob=False,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64, partial_rotary_factor=0.75), head_dim=32,
    ),
    _deepseek_v3(
        "yarn", "fan_in", rms_norm_eps=1e-2,
        rope_parameters=_rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
    ),
    _deepseek_v3(
        "one-group", n_group=1, topk_group=1, rope_interleave=False, q_lora_rank=None, attention_bias=True, norm_topk_prob=False,
        v_head_dim=28, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.3),
    ),
    _deepseek_v2("lite", q_lora_rank=None, first_k_dense_replace=1, routed_scaling_factor=1.5, rope_interleave=False),
    _deepseek_v2(
        "groups", n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0, n_shared_experts=1,
        attention_bias=True, mlp_bias=True,
        rope_parameters=_rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707),
    ),
    Row(
        "mistral4-plain",
        hf.Mistral4Config,
        hf.Mistral4ForCausalLM,
        (
            *LATENT.items(),
            ("n_group", 2),
            ("topk_group", 1),
            ("first_k_dense_replace", 1),
            (
                "rope_parameters",
                _rope(
                    "yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0,
                    llama_4_scaling_beta=0.5, max_position_embeddings=512,
                ),
            ),
        ),
        (),
    ),
    _glm_lite("plain"),  # 4.7-Flash
    _glm_lite("mlp-types", mlp_layer_types=["sparse", "dense", "sparse"], n_group=2, topk_group=1, v_head_dim=24),
    _gemma3(
        "plain", "fan_in", final_logit_softcapping=2.0,
        rope_parameters=by_type(_rope("linear", factor=8.0), _rope("default", rope_theta=100.0)),
    ),
    _gemma2("plain", "fan_in"),
    _gemma2("biases", attention_bias=True, tie_word_embeddings=False, layer_types=ALTERNATING, final_logit_softcapping=None),
    _gemma3("biases", attention_bias=True, tie_word_embeddings=False, layer_types=ALTERNATING),
    _gemma4("keys-alone", attention_k_eq_v=True, num_global_key_value_heads=1, head_dim=24),  # 31B
    _gemma4("experts", "fan_in", attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True, num_experts=4, top_k_experts=2,
            moe_intermediate_size=16),  # 26B-A4B
    _gemma4("values", attention_bias=True, num_key_value_heads=4),
    _glm4("plain", "fan_in"),  # 9B-0414, 32B-0414
    _glm4("whole-heads", attention_bias=False, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64, partial_rotary_factor=1.0)),
    _gpt_oss("plain"),  # 20B, 120B; by default in test_sinks.py
    _gpt_oss("no-biases", attention_bias=False, num_experts_per_tok=4, layer_types=TWO_TO_ONE),
    Row("olmo2-plain", hf.Olmo2Config, hf.Olmo2ForCausalLM, (("attention_bias", True),), ()),
    _olmo3("plain", "fan_in", rope_parameters=by_type(
        _rope("yarn", factor=8.0, original_max_position_embeddings=64), _rope("default", rope_theta=500.0)
    )),
    _phi3("long", "fan_in", original_max_position_embeddings=64, rope_parameters=_rope(
        "longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64, partial_rotary_factor=0.75
    )),  # Phi-4-mini
    _phi3("window", sliding_window=WINDOW),
    _qwen3_moe("window-step", use_sliding_window=True, sliding_window=WINDOW, decoder_sparse_step=2, num_experts_per_tok=3),
)  # fmt: skip
