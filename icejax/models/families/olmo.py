"""OLMo 2 and 3."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import common, common_by_type, finish, layer_types

# Parts of parameter names: ours, and those of the family's checkpoints.
RENAMED = (
    ("post_self_attn_layernorm", "post_attention_layernorm"),
    ("post_mlp_layernorm", "post_feedforward_layernorm"),
)
DEFAULTS = dict(rms_norm_eps=1e-5)


def read_olmo2_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of an `olmo2` checkpoint: norms only after attention and MLP; q and k have one norm over all heads."""
    fields, values = common(DEFAULTS | raw)
    return _read(fields, values, None)


def read_olmo3_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of an `olmo3` checkpoint: three sliding layers to one full layer, and only full layers scale RoPE."""
    # transformers applies `rope_theta` to full-attention layers only.
    fields, values = common_by_type(DEFAULTS | raw, full=raw.get("rope_theta") or 5e5, sliding=5e5)
    return _read(fields, values, fields.whole("sliding_window", default=4096))


def _read(fields: Fields, values: dict[str, Any], window: int | None) -> ModelConfig:
    bias, layers = fields.take("attention_bias", bool, default=False), values["num_hidden_layers"]
    values |= dict(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm="all", norm="wide", norm_places="after")
    values |= layer_types(fields, layers, window=window, sliding=[i for i in range(layers) if (i + 1) % 4])
    finish(fields)
    return ModelConfig(**values)
