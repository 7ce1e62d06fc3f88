"""Minimal config.json contents that icejax reads: llama's in BASE, and the fields that other families need besides."""

from __future__ import annotations

from icejax.config import ModelConfig
from icejax.models.registry import family

BASE = dict(
    model_type="llama", vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6, hidden_act="silu",
)  # fmt: skip


def read(**changes) -> ModelConfig:
    """Returns the ModelConfig of BASE with `changes`; the value `...` removes a field."""
    raw = {name: value for name, value in (BASE | changes).items() if value is not ...}
    return family(raw).read_config(raw)


NAN, INFINITY = float("nan"), float("inf")
YARN = {"rope_type": "yarn", "factor": 4.0}
MOE = dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
QWEN2_MOE = MOE | dict(model_type="qwen2_moe", shared_expert_intermediate_size=24)
GLM = dict(model_type="glm4_moe", n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
SIZES = dict(kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4)
V2 = GLM | SIZES | dict(model_type="deepseek_v2")
V3 = GLM | SIZES | dict(model_type="deepseek_v3", n_group=4, topk_group=2)
LITE = GLM | SIZES | dict(model_type="glm4_moe_lite")
MISTRAL4 = GLM | SIZES | dict(model_type="mistral4", rope_parameters=YARN)
MINIMAX = dict(model_type="minimax_m2", head_dim=16, num_local_experts=4, num_experts_per_tok=2)
GEMMA3 = dict(model_type="gemma3_text", sliding_window=8, hidden_act=...)
MIXTRAL = dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
MINISTRAL3 = dict(model_type="ministral3", rope_parameters=YARN)
GEMMA4 = dict(
    model_type="gemma4_text", hidden_act=..., head_dim=16, global_head_dim=32, hidden_size_per_layer_input=0, sliding_window=8,
)  # fmt: skip
GEMMA4_MOE = GEMMA4 | dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16)
GPT_OSS = dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2)
OLMO3 = dict(model_type="olmo3", sliding_window=8)
PHI3 = dict(model_type="phi3", original_max_position_embeddings=64, sliding_window=8)
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# The smallest config of each family, beside BASE.
SMALLEST = {
    "llama": {}, "mistral": {}, "ministral": {}, "qwen2": {}, "qwen3": {}, "glm4": {}, "olmo2": {}, "ministral3": MINISTRAL3,
    "mistral4": MISTRAL4, "mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE, "qwen3_moe": MOE,
    "gemma2": dict(hidden_act=...), "gemma3_text": GEMMA3, "gemma4_text": GEMMA4_MOE, "gpt_oss": GPT_OSS,
    "olmo3": OLMO3, "phi3": PHI3, "deepseek_v2": V2 | dict(topk_method="group_limited_greedy"), "deepseek_v3": V3,
    "kimi_k2": V3, "glm4_moe": GLM, "glm4_moe_lite": LITE, "minimax_m2": MINIMAX,
}  # fmt: skip
