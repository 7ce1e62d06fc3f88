"""Gemma 2, and the text models of Gemma 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from icejax.checks import numbers
from icejax.config import ModelConfig
from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import NEUTRAL, common, common_by_type, finish, layer_types

# Parts of parameter names: ours, and those of the family's checkpoints.
RENAMED = (
    ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_attention_layernorm"),
    ("post_mlp_layernorm", "post_feedforward_layernorm"),
)
# Defaults of transformers for fields that a config lacks; configs of models with images lack many.
GEMMA2 = dict(
    num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True,
    attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
)  # fmt: skip
DEFAULTS = dict(
    vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131072,
    tie_word_embeddings=True,
)  # fmt: skip
ONLY = NEUTRAL | {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)}


def read_gemma2_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `gemma2` checkpoint: every second layer slides, and attention scores have a soft cap."""
    fields, values = common(GEMMA2 | raw)
    values |= _form(fields, values) | dict(attn_logit_softcapping=_cap(fields, "attn_logit_softcapping"))
    layers, window = values["num_hidden_layers"], fields.whole("sliding_window", default=4096)
    values |= layer_types(fields, layers, window=window, sliding=range(0, layers, 2))
    finish(fields, neutral=ONLY)
    return ModelConfig(**values)


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `gemma3_text` checkpoint: five sliding layers to one full layer, and a RoPE for each type."""
    theta, sliding_theta = raw.get("rope_theta") or 1e6, raw.get("rope_local_base_freq") or 1e4
    fields, values = common_by_type(DEFAULTS | raw, full=theta, sliding=sliding_theta)
    fields.taken.add("rope_local_base_freq")
    layers, scaling = values["num_hidden_layers"], values["rope_scaling"]
    if scaling is not None and scaling.rope_type == "linear":  # max_position_embeddings includes the factor
        context = values["max_position_embeddings"]
        numbers.number("config.json: the linear factor of RoPE", scaling.factor, least=1, most=context)
        values["rope_scaling"] = replace(scaling, original_max_position_embeddings=int(context / scaling.factor))
    period = fields.whole("sliding_window_pattern", default=6)
    values |= _form(fields, values) | dict(qk_norm="head")
    window, sliding_layers = fields.whole("sliding_window", default=4096), [i for i in range(layers) if (i + 1) % period]
    values |= layer_types(fields, layers, window=window, sliding=sliding_layers)
    finish(fields, neutral=ONLY)
    return ModelConfig(**values)


def _form(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the ModelConfig fields that Gemma 2 and 3 share."""
    bias = fields.take("attention_bias", bool, default=False)
    return dict(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        qk_norm=None,
        norm="offset",
        norm_places="both",
        hidden_act="gelu_pytorch_tanh",
        embed_scale=values["hidden_size"] ** 0.5,
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar", least=0, most=1e6, above=True, default=256),
        final_logit_softcapping=_cap(fields, "final_logit_softcapping"),
    )


def _cap(fields: Fields, name: str) -> float | None:
    return fields.number(name, least=0, most=1e6, above=True, default=None)
