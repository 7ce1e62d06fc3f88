"""The text models of Gemma 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from icejax import ranges
from icejax.config import ModelConfig
from icejax.models.hf_config import NEUTRAL, common_by_type, finish, layer_types

# Parts of parameters' names, ours and those of its checkpoints.
RENAMED = (
    ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_attention_layernorm"),
    ("post_mlp_layernorm", "post_feedforward_layernorm"),
)
# What transformers takes where a config does not say: those of models with images say little.
DEFAULTS = dict(
    vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131072,
    tie_word_embeddings=True,
)  # fmt: skip
ONLY = NEUTRAL | {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)}


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `gemma3_text` checkpoint: five layers that slide to one that does not, each with its own RoPE."""
    theta, near = raw.get("rope_theta") or 1e6, raw.get("rope_local_base_freq") or 1e4
    fields, values = common_by_type(DEFAULTS | raw, full=theta, sliding=near)
    fields.taken |= {"rope_local_base_freq", "_sliding_window_pattern"}
    layers, scaling = values["num_hidden_layers"], values["rope_scaling"]
    if scaling is not None and scaling.rope_type == "linear":  # the context counts it in
        longest = values["max_position_embeddings"]
        ranges.number("config.json: the linear factor of RoPE", scaling.factor, least=1, most=longest)
        values["rope_scaling"] = replace(scaling, original_max_position_embeddings=int(longest / scaling.factor))
    bias, every = fields.take("attention_bias", bool, default=False), fields.whole("sliding_window_pattern", default=6)
    values |= dict(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        qk_norm="head",
        norm="offset",
        norm_places="both",
        hidden_act="gelu_pytorch_tanh",
        embed_scale=values["hidden_size"] ** 0.5,
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar", least=0, most=1e6, above=True, default=256),
        final_logit_softcapping=fields.number("final_logit_softcapping", least=0, most=1e6, above=True, default=None),
    )
    window, slides = fields.whole("sliding_window", default=4096), [i for i in range(layers) if (i + 1) % every]
    values |= layer_types(fields, layers, window=window, sliding=slides)
    finish(fields, neutral=ONLY)
    return ModelConfig(**values)
