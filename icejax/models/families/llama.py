"""Llama 1, 2, 3, 3.1, 3.2, and models with their architecture (LongChat, DeepSeek-R1-Distill-Llama)."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf.hf_config import common, finish, layer_types


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `llama` checkpoint."""
    fields, values = common(raw)
    bias = fields.take("attention_bias", bool, default=False)
    values |= dict(qkv_bias=bias, o_bias=bias, mlp_bias=fields.take("mlp_bias", bool, default=False), qk_norm=None)
    values |= layer_types(fields, values["num_hidden_layers"], window=None, sliding=range(0))
    finish(fields)
    return ModelConfig(**values)
