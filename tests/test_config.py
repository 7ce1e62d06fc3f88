"""Reading config.json: both forms, every number used, nothing unknown passed over."""

import dataclasses
import json
import re

import numpy as np
import pytest

from icejax.cache import Full
from icejax.checkpoint import read_config
from icejax.errors import InputError
from icejax.models import family
from tests import families
from tests.run import all_logits

BASE = dict(
    model_type="llama", vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6, hidden_act="silu",
)  # fmt: skip


def read(**changes):
    raw = {name: value for name, value in (BASE | changes).items() if value is not ...}
    return family(raw).read_config(raw)


@pytest.mark.parametrize(
    "old, new",
    [
        ({"rope_theta": 5e5, "torch_dtype": "bfloat16"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "bfloat16"}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": ..., "rope_theta": 1e4},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}},
        ),
    ],
)  # fmt: skip
def test_the_forms_of_transformers_4_and_5_read_alike(old, new):
    assert read(**old) == read(**new)


def test_rope_scaling_put_into_a_new_config_wins():
    """As in transformers: it is how a reader of Qwen's model card stretches the context."""
    both = read(
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    )
    assert both.rope_theta == 1e6 and both.rope_scaling.rope_type == "yarn" and both.rope_scaling.factor == 4.0


def test_scalings_that_configs_do_not_count_in_lengthen_the_context():
    assert read(rope_scaling={"type": "linear", "factor": 8.0}).context_length == 4096
    assert read(rope_scaling={"type": "dynamic", "factor": 4.0}).context_length == 2048
    assert read(rope_scaling={"type": "yarn", "factor": 8.0}).context_length == 512
    assert read().context_length == 512


def test_defaults_of_old_configs():
    """Llama 1 says nothing of KV heads, theta and head size; Mistral without a word has its window, null has none."""
    config = read(num_key_value_heads=..., rms_norm_eps=...)
    assert (config.num_key_value_heads, config.rope_theta, config.head_dim, config.rms_norm_eps) == (4, 1e4, 16, 1e-6)
    assert read(model_type="mistral").sliding_window == 4096
    assert read(model_type="mistral", sliding_window=None).sliding_window is None
    assert read(model_type="qwen3").head_dim == 128
    mixtral = read(**MIXTRAL, rms_norm_eps=...)
    assert (mixtral.rms_norm_eps, mixtral.rope_theta, mixtral.sliding_window) == (1e-5, 1e6, None)
    assert read(model_type="qwen2", sliding_window=8, use_sliding_window=False).sliding_window is None
    moe = read(**QWEN2_MOE, sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert moe.layer_types == ("sliding_attention", "full_attention", "full_attention") and moe.qkv_bias
    window = read(model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert window.layer_types == ("full_attention", "full_attention", "sliding_attention")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": ...}, "config.json has no 'model_type': expected one of llama, mistral"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported: expected one of llama"),
        ({"vocab_size": ...}, "config.json has no 'vocab_size', which a llama model needs"),
        ({"hidden_size": "64"}, "config.json: 'hidden_size' must be a whole number, got '64'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attn_logit_softcapping": 30.0}, "field 'attn_logit_softcapping' .* is not known"),
        ({"qk_norm": True}, "field 'qk_norm'"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}, "rope type 'axial' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs 'factor'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}},
            r"fields \['beta_fast'\] of rope type 'linear'",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "config.json: 'rope_scaling' must be an object, got 'linear'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "8"}},
            "rope_scaling: 'factor' must be a number from 1 to 1e\\+06, got '8'",
        ),
        ({"rope_scaling": {"factor": 8.0}}, r"fields \['factor'\] of rope type 'default'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"fields \['full_attention'\] of rope type 'default'"),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide among 3 KV heads"),
        ({"layer_types": ["full_attention"]}, "layer_types must name .* for 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
    ],
)
def test_what_is_missing_unknown_or_unsupported_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        read(**changes)


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


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported: expected one of llama"),
        ({"model_type": {}}, "model_type {} is not supported"),
        ({"num_hidden_layers": 20000}, "'num_hidden_layers' must be at most 1024, got 20000"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' must be a whole number, got True"),
        ({"num_hidden_layers": 3.0}, "'num_hidden_layers' must be a whole number, got 3.0"),
        ({"num_key_value_heads": 0}, "'num_key_value_heads' must be at least 1, got 0"),
        ({"num_key_value_heads": 8}, "'num_key_value_heads' must be at most 4, got 8"),
        ({"num_attention_heads": -1}, "'num_attention_heads' must be at least 1, got -1"),
        ({"vocab_size": 10**12}, "'vocab_size' must be at most 16777216, got 1000000000000"),
        ({"hidden_size": 2**31}, "'hidden_size' must be at most 1048576, got 2147483648"),
        ({"hidden_size": 3}, "heads must have an even size of at least 4 to be rotated, got 0"),
        ({"head_dim": 17}, "heads must have an even size of at least 4 to be rotated, got 17"),
        ({"head_dim": 0}, "'head_dim' must be at least 1, got 0"),
        ({"intermediate_size": None}, "config.json has no 'intermediate_size', which a llama model needs"),
        ({"intermediate_size": -96}, "'intermediate_size' must be at least 1, got -96"),
        ({"max_position_embeddings": 0}, "'max_position_embeddings' must be at least 1, got 0"),
        ({"rms_norm_eps": NAN}, "'rms_norm_eps' must be a number above 0 and at most 1, got nan"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' must be a number above 0 and at most 1, got 0"),
        ({"rms_norm_eps": "1e-6"}, "'rms_norm_eps' must be a number above 0 and at most 1, got '1e-6'"),
        ({"rope_theta": -1e4}, "'rope_theta' must be a number from 2 to 1e+20, got -10000.0"),
        ({"rope_theta": 0}, "'rope_theta' must be a number from 2 to 1e+20, got 0"),
        ({"rope_theta": INFINITY}, "'rope_theta' must be a number from 2 to 1e+20, got inf"),
        ({"rope_theta": 10**400}, "'rope_theta' must be a number from 2 to 1e+20, got 1000"),
        ({"rope_parameters": {"rope_theta": 1}}, "rope_parameters: 'rope_theta' must be a number from 2 to 1e+20, got 1"),
        ({"rope_scaling": []}, "'rope_scaling' must be an object, got []"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling: 'rope_type' must be a text, got ['yarn']"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' must be a number from 1 to 1e+06, got 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "'factor' must be a number from 1 to 1e+06, got True"),
        ({"rope_scaling": {"type": "linear", "factor": 1e6}, "max_position_embeddings": 2**30}, "a context of 1073741824 x 1e+06 tokens"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "'low_freq_factor' must be below 'high_freq_factor', got {"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": NAN}}, "'low_freq_factor' must be a number from 1e-06 to 1e+06, got nan"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "'original_max_position_embeddings' must be at least 1"),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, "'beta_fast' must be a number from 1e-06 to 1e+06, got 0"),
        ({"rope_scaling": YARN | {"beta_slow": -1}}, "'beta_slow' must be a number from 1e-06 to 1e+06, got -1"),
        ({"rope_scaling": YARN | {"attention_factor": INFINITY}}, "'attention_factor' must be a number from 1e-06 to 1e+06"),
        ({"rope_scaling": YARN | {"mscale": NAN}}, "'mscale' must be a number from 0 to 1e+06, got nan"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "'truncate' must be true or false, got 1"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1024}}, "the factor must be a number from 1 to 1e+06, got 0.5"),
        (MINISTRAL3 | {"rope_parameters": YARN | {"llama_4_scaling_beta": -1}}, "'llama_4_scaling_beta' must be a number from 0 to 1e+06, got -1"),
        (MINISTRAL3 | {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "fields ['llama_4_scaling_beta'] of rope type 'default' are"),
        (MINISTRAL3 | {"rope_parameters": ...}, "config.json has no 'rope_parameters', which a ministral3 model needs"),
        ({"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}, "fields ['llama_4_scaling_beta'] of rope type 'yarn' are not known"),
        ({"layer_types": [["full_attention"], {}, 3]}, "layer_types must name full_attention or sliding_attention for 3 layers, got [["),
        ({"model_type": "mistral", "sliding_window": 0}, "'sliding_window' must be at least 1, got 0"),
        ({"model_type": "qwen2", "use_sliding_window": 1}, "'use_sliding_window' must be true or false, got 1"),
        ({"model_type": "qwen2", "max_window_layers": -1}, "'max_window_layers' must be at least 0, got -1"),
        (MOE | {"num_experts": ...}, "config.json has no 'num_experts', which a qwen3_moe model needs"),
        (MOE | {"num_experts": 0}, "'num_experts' must be at least 1, got 0"),
        (MOE | {"num_experts": ..., "num_local_experts": 1025}, "'num_local_experts' must be at most 1024, got 1025"),
        (MOE | {"num_experts_per_tok": 9}, "'num_experts_per_tok' must be at most 8, got 9"),
        (MOE | {"moe_intermediate_size": 0}, "'moe_intermediate_size' must be at least 1, got 0"),
        (MOE | {"norm_topk_prob": 1}, "'norm_topk_prob' must be true or false, got 1"),
        (MOE | {"mlp_only_layers": 3}, "'mlp_only_layers' must be a list, got 3"),
        (MOE | {"mlp_only_layers": [3]}, "'mlp_only_layers' must be at most 2, got 3"),
        (MOE | {"mlp_only_layers": ["a"]}, "'mlp_only_layers' must be a whole number, got 'a'"),
        (MOE | {"decoder_sparse_step": 0}, "'decoder_sparse_step' must be at least 1, got 0"),
        (MOE | {"max_window_layers": "a"}, "'max_window_layers' must be a whole number, got 'a'"),
        (QWEN2_MOE | {"shared_expert_intermediate_size": ...}, "config.json has no 'shared_expert_intermediate_size', which a qwen2_moe"),
        (QWEN2_MOE | {"shared_expert_intermediate_size": 0}, "'shared_expert_intermediate_size' must be at least 1, got 0"),
        (QWEN2_MOE | {"qkv_bias": "no"}, "'qkv_bias' must be true or false, got 'no'"),
        (GLM | {"n_routed_experts": ...}, "config.json has no 'n_routed_experts', which a glm4_moe model needs"),
        (GLM | {"n_group": 0}, "'n_group' must be at least 1, got 0"),
        (GLM | {"n_group": 3}, "8 experts do not divide among 3 groups of 2 or more"),
        (GLM | {"n_group": 8}, "8 experts do not divide among 8 groups of 2 or more"),
        (GLM | {"n_group": 2, "topk_group": 3}, "'topk_group' must be at most 2, got 3"),
        (GLM | {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "'num_experts_per_tok' must be at most 2, got 3"),
        (GLM | {"norm_topk_prob": 1}, "'norm_topk_prob' must be true or false, got 1"),
        (GLM | {"routed_scaling_factor": 0}, "'routed_scaling_factor' must be a number above 0 and at most 1e+06, got 0"),
        (GLM | {"n_shared_experts": 0}, "'n_shared_experts' must be at least 1, got 0"),
        (GLM | {"first_k_dense_replace": 4}, "'first_k_dense_replace' must be at most 3, got 4"),
        (GLM | {"num_nextn_predict_layers": -1}, "'num_nextn_predict_layers' must be at least 0, got -1"),
        (GLM | {"use_qk_norm": 1}, "'use_qk_norm' must be true or false, got 1"),
        (GLM | {"partial_rotary_factor": 0}, "'partial_rotary_factor' must be a number above 0 and at most 1, got 0"),
        (GLM | {"partial_rotary_factor": 0.2}, "heads must have an even size of at least 4 to be rotated, got 3"),
        (GLM | {"rope_parameters": {"partial_rotary_factor": 2}}, "'partial_rotary_factor' must be a number above 0 and at most 1, got 2"),
        (V3 | {"kv_lora_rank": ...}, "config.json has no 'kv_lora_rank', which a deepseek_v3 model needs"),
        (V3 | {"qk_rope_head_dim": ...}, "config.json has no 'qk_rope_head_dim', which a deepseek_v3 model needs"),
        (V3 | {"qk_rope_head_dim": 2}, "heads must have an even size of at least 4 to be rotated, got 2"),
        (V3 | {"qk_nope_head_dim": 0}, "'qk_nope_head_dim' must be at least 1, got 0"),
        (V3 | {"v_head_dim": 4097}, "'v_head_dim' must be at most 4096, got 4097"),
        (V3 | {"q_lora_rank": 0}, "'q_lora_rank' must be at least 1, got 0"),
        (V3 | {"rope_interleave": 1}, "'rope_interleave' must be true or false, got 1"),
        (V3 | {"num_key_value_heads": 2}, "heads made of one latent have keys each: expected num_key_value_heads = 4, got 2"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported (only 'sigmoid')"),
        (V3 | {"topk_method": "greedy"}, "topk_method='greedy' is not supported (only 'noaux_tc')"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported (only 1)"),
        (V3 | {"index_topk": 2048}, "field 'index_topk' (2048) is not known here"),
        (V2 | {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported (only 'softmax')"),
        (V2 | {"topk_method": "noaux_tc"}, "'topk_method' must be one of greedy, group_limited_greedy, got 'noaux_tc'"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob=True is not supported (only False: transformers does not read it)"),
        (V2 | {"topk_method": "group_limited_greedy", "n_group": 3}, "8 experts do not divide among 3 groups of 1 or more"),
        (LITE | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name dense or sparse for 3 layers, got ['dense'] (1)"),
        (LITE | {"mlp_layer_types": [{}, [], 1]}, "mlp_layer_types must name dense or sparse for 3 layers, got [{}, [], 1] (3)"),
        (MISTRAL4 | {"rope_parameters": ...}, "config.json has no 'rope_parameters', which a mistral4 model needs"),
        (
            MISTRAL4 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor must be that of qk_rope_head_dim = 8, got 12 of 24 channels",
        ),
        (MINIMAX | {"rotary_dim": 2}, "'rotary_dim' must be at least 4, got 2"),
        (MINIMAX | {"rotary_dim": 17}, "'rotary_dim' must be at most 16, got 17"),
        (MINIMAX | {"rotary_dim": 7}, "heads must have an even size of at least 4 to be rotated, got 7"),
        (MINIMAX | {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported (only 'sigmoid')"),
        (MINIMAX | {"shared_intermediate_size": 8}, "shared_intermediate_size=8 is not supported (only 0)"),
        (MINIMAX | {"attn_type_list": [1, 0, 1]}, "attn_type_list=[1, 0, 1] is not supported (only 1, full attention)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported (only 1.0)"),
        (MIXTRAL | {"num_local_experts": ...}, "config.json has no 'num_local_experts', which a mixtral model needs"),
        (MIXTRAL | {"num_local_experts": 0}, "'num_local_experts' must be at least 1, got 0"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "'num_experts_per_tok' must be at most 4, got 5"),
        (MIXTRAL | {"sliding_window": 0}, "'sliding_window' must be at least 1, got 0"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported (only 'gelu_pytorch_tanh')"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported (only False)"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "field 'attn_logit_softcapping' (50.0) is not known here"),
        (GEMMA3 | {"final_logit_softcapping": 0}, "'final_logit_softcapping' must be a number above 0 and at most 1e+06, got 0"),
        (GEMMA3 | {"query_pre_attn_scalar": "a"}, "'query_pre_attn_scalar' must be a number above 0 and at most 1e+06, got 'a'"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "'sliding_window_pattern' must be at least 1, got 0"),
        (GEMMA3 | {"rope_local_base_freq": 1}, "rope_parameters: 'rope_theta' must be a number from 2 to 1e+20, got 1"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e6}}, "'rope_parameters' must be an object of full_attention and sliding_attention, got {"),
        (GEMMA3 | {"rope_parameters": {"full_attention": [1]}}, "'rope_parameters' must be an object of full_attention and sliding_attention, got {"),
        (GEMMA3 | {"rope_parameters": 3}, "'rope_parameters' must be an object of full_attention and sliding_attention, got 3"),
        (dict(model_type="glm4", attention_bias=0), "'attention_bias' must be true or false, got 0"),
        (dict(model_type="glm4", sliding_window=8, layer_types=["sliding_attention"] * 3), "no sliding_window is in use"),
        (dict(model_type="olmo2", attention_bias=0), "'attention_bias' must be true or false, got 0"),
        (dict(model_type="olmo2", clip_qkv=8.0), "field 'clip_qkv' (8.0) is not known here"),
        (GEMMA4 | {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256 is not supported (only 0)"),
        (GEMMA4 | {"hidden_size_per_layer_input": ...}, "hidden_size_per_layer_input=256 is not supported (only 0)"),
        (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 is not supported (only 0)"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported (only 'vision')"),
        (GEMMA4 | {"layer_types": ["sliding_attention"] * 3}, "layer_types must end with full_attention, got sliding_attention"),
        (GEMMA4 | {"global_head_dim": 0}, "'global_head_dim' must be at least 1, got 0"),
        (GEMMA4 | {"attention_k_eq_v": 1}, "'attention_k_eq_v' must be true or false, got 1"),
        (GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "4 attention heads do not divide among 3 KV heads"),
        (GEMMA4 | {"num_key_value_heads": 3, "per_layer_config": {"2": {"num_key_value_heads": 1}}}, "4 attention heads do not divide among 3"),
        (GEMMA4 | {"per_layer_config": {"1": {"head_dim": 32}}}, "must give layers of full attention alike head_dim and num_key"),
        (GEMMA4 | {"per_layer_config": {"2": {"window": 32}}}, "must give layers of full attention alike head_dim and num_key"),
        (GEMMA4 | {"per_layer_config": {"2": {"head_dim": 0}}}, "per_layer_config: 'head_dim' must be at least 1, got 0"),
        (GEMMA4 | {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
         "'partial_rotary_factor' must be a number above 0 and at most 1, got 2"),
        (GEMMA4_MOE | {"top_k_experts": 5}, "'top_k_experts' must be at most 4, got 5"),
        (GEMMA4_MOE | {"num_experts": ...}, "config.json has no 'num_experts', which a gemma4_text model needs"),
        (GPT_OSS | {"num_local_experts": ...}, "config.json has no 'num_local_experts', which a gpt_oss model needs"),
        (GPT_OSS | {"swiglu_limit": 0}, "'swiglu_limit' must be a number above 0 and at most 1e+06, got 0"),
        (GPT_OSS | {"swiglu_alpha": "a"}, "'swiglu_alpha' must be a number above 0 and at most 1e+06, got 'a'"),
        (GPT_OSS | {"experts_per_token": 3}, "experts_per_token=3 is not supported (only 2)"),
        (GPT_OSS | {"sliding_window": 0}, "'sliding_window' must be at least 1, got 0"),
        (OLMO3 | {"rope_parameters": LLAMA3}, "'rope_parameters' must be an object of full_attention and sliding_attention, got {"),
        (OLMO3 | {"sliding_window": 0}, "'sliding_window' must be at least 1, got 0"),
        (PHI3 | {"sliding_window": 0}, "'sliding_window' must be at least 1, got 0"),
        (PHI3 | {"lm_head_bias": True}, "lm_head_bias=True is not supported (only False)"),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": None}}, "config.json, rope_scaling has no 'long_factor', which is needed"),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": [0] * 8}}, "'short_factor' must be a number from 1e-06 to 1e+06, got 0"),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": [1]}}, "8 frequencies need as many factors, got 1"),
        (PHI3 | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5}, "4 frequencies need as many factors, got 8"),
        (PHI3 | {"rope_scaling": LONGROPE | {"attention_factor": NAN}}, "'attention_factor' must be a number from 1e-06 to 1e+06, got nan"),
        (dict(model_type="gemma4", text_config=[]), "'text_config' must be an object, got []"),
        (dict(model_type="gemma3"), "config.json has no 'text_config', which a gemma3 model needs"),
        (MOE | {"n_group": 4}, "field 'n_group' (4) is not known here"),
        ({"num_experts": 8}, "field 'num_experts' (8) is not known here"),
        ({"eos_token_id": "2"}, "'eos_token_id' must be a whole number, got '2'"),
        ({"eos_token_id": [2, 1.5]}, "'eos_token_id' must be a whole number, got 1.5"),
        ({"eos_token_id": -1}, "'eos_token_id' must be at least 0, got -1"),
        ({"eos_token_id": [0] * 1025}, "'eos_token_id' must be a token id or at most 1024 of them, got 1025"),
        ({"torch_dtype": 16}, "'torch_dtype' must be a text, got 16"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' must be true or false, got 'no'"),
        ({"x" * 10**6: 1}, "is not known here"),
    ],
)  # fmt: skip
def test_every_value_has_a_range(changes, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        read(**changes)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_gemma_4_says_its_head_sizes_in_two_ways():
    both = GEMMA4 | dict(attention_k_eq_v=True)
    config = read(**both, num_global_key_value_heads=1)
    assert config == read(**both, per_layer_config={"2": {"head_dim": 32, "num_key_value_heads": 1}})
    assert [(x.window, x.kv_heads, x.head_dim, x.rope.size, x.keys_alone) for x in config.layers[1:]] == [
        (8, 2, 16, 16, False), (None, 1, 32, 32, True)
    ]  # fmt: skip
    assert read(**GEMMA4 | dict(global_head_dim=...)).head_dim == 512


def test_generation_config_is_read_as_carefully(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    for value, found in (("two", "'two'"), ([None], "None"), ({"id": 2}, "{'id': 2}")):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(
            InputError, match=re.escape(f"generation_config.json: 'eos_token_id' must be a whole number, got {found}")
        ):
            read_config(tmp_path)


# Fields whose change alone cannot change logits, or has a test of its own: the last are in the parity of Gemma and GLM.
INERT = {
    "model_type", "dtype", "eos_token_ids", "max_position_embeddings", "experts", "dense_layers", "latent",
    "norm", "rope_interleave", "hidden_act", "embed_scale", "query_pre_attn_scalar", "sliding_rope",
    "sliding_head_dim", "sliding_key_value_heads", "v_norm", "final_logit_softcapping",
}  # fmt: skip
SHAPES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings", "norm_places", "fused_qkv", "fused_mlp",
    "sinks", "keys_alone", "layer_scalar",
}  # fmt: skip


def test_every_number_of_the_config_is_read(tmp_path):
    """Each field changes the logits, or the parameters that a checkpoint must have."""
    import icejax.checkpoint.load as load

    model = families.load(families.build(families.row("llama-llama3")), tmp_path)
    prompt = families.tokens(100)
    before = all_logits(model, prompt, Full())
    parameters = load.abstract(model.config, "float32")[1]
    changes = {
        "rms_norm_eps": 1e-2,
        "rotary_dim": 8,
        "qk_norm": "all",
        "norm_places": "both",
        "rope_theta": 2e4,
        "rope_scaling": None,
        "layer_types": ("sliding_attention",) * 3,
        "sliding_window": 8,
    }
    for field in dataclasses.fields(model.config):
        if field.name in INERT:
            continue
        old = getattr(model.config, field.name)
        new = changes.get(field.name, not old if isinstance(old, bool) else old * 2 if isinstance(old, int) else old)
        both = {"layer_types", "sliding_window"}
        changed = dataclasses.replace(
            model.config, **{n: changes[n] for n in both} if field.name in both else {field.name: new}
        )
        if field.name == "num_hidden_layers":  # each has a type
            changed = dataclasses.replace(changed, layer_types=2 * changed.layer_types)
            assert load.abstract(dataclasses.replace(changed, num_hidden_layers=old), "float32")[1].keys() == parameters.keys()
        if field.name in SHAPES:
            assert {k: p.shape for k, p in load.abstract(changed, "float32")[1].items()} != {
                k: p.shape for k, p in parameters.items()
            }
            continue
        import flax.nnx as nnx
        import jax

        graph, _, tree = load.abstract(changed, "float32")
        after = all_logits(nnx.merge(graph, jax.tree.unflatten(tree, jax.tree.leaves(model))), prompt, Full())
        assert np.abs(after - before).max() > 1e-3, field.name


def test_eos_ids_of_both_files_are_joined(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    assert read_config(tmp_path).eos_token_ids == (2, 3)
