"""GLM-4-0414 and successors with one MLP per layer."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf.hf_config import common, finish, layer_types


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `glm4` checkpoint: norms on both sides of blocks, half a head rotated in pairs."""
    fields, values = common({"head_dim": 128, "rms_norm_eps": 1.5625e-7, **raw}, part=0.5)
    bias = fields.take("attention_bias", bool, default=True)
    values |= dict(qkv_bias=bias, o_bias=False, mlp_bias=False, qk_norm=None)
    values |= dict(norm_places="both", rope_interleave=True)
    values |= layer_types(fields, values["num_hidden_layers"], window=None, sliding=range(0))
    finish(fields)
    return ModelConfig(**values)
