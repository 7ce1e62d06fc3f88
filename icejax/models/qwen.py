"""Qwen2, Qwen2.5 and Qwen3, and what has their architecture (DeepSeek-R1-Distill-Qwen)."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf_config import common, finish, layer_types


def read_qwen2_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen2` checkpoint: biased q, k and v."""
    return _read(raw, lambda fields: dict(qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False))


def read_qwen3_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen3` checkpoint: normed q and k, head_dim 128 unless said."""

    def attention(fields) -> dict[str, Any]:
        bias = fields.take("attention_bias", bool, default=False)
        return dict(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=True)

    return _read({"head_dim": 128, **raw}, attention)


def _read(raw: dict[str, Any], attention) -> ModelConfig:
    fields, values = common(raw)
    slides = fields.take("use_sliding_window", bool, default=False)
    window = fields.whole("sliding_window", default=4096) if slides else None
    first = fields.whole("max_window_layers", least=0, default=28)
    values |= attention(fields) | layer_types(fields, values["num_hidden_layers"], window=window, first_sliding=first)
    finish(fields)
    return ModelConfig(**values)
