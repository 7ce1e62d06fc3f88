"""Mistral 7B v0.1 to v0.3, Codestral-22B, Mistral-Nemo and Ministral."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf_config import common, finish, layer_types


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `mistral` or `ministral` checkpoint; a sliding window (v0.1) is on every layer."""
    # transformers' own default where the field is absent; v0.2 and later write null.
    raw = raw if "sliding_window" in raw else raw | {"sliding_window": 4096}
    fields, values = common(raw)
    values |= dict(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)
    window = fields.whole("sliding_window", default=None)
    layers = values["num_hidden_layers"]
    values |= layer_types(fields, layers, window=window, sliding=range(layers))
    finish(fields)
    return ModelConfig(**values)
