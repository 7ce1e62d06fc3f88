"""Mixtral 8x7B and 8x22B."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf.hf_config import SOFTMAX, common, experts, finish, layer_types

# Parts of parameter names: ours, and those of the family's checkpoints.
RENAMED = (("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `mixtral` checkpoint; all layers slide if there is a window."""
    fields, values = common({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **raw})
    values |= dict(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=None)
    window = fields.whole("sliding_window", default=None)
    layers = values["num_hidden_layers"]
    values |= layer_types(fields, layers, window=window, sliding=None)
    mixture = experts(fields, count="num_local_experts", size="intermediate_size", routing=SOFTMAX)
    finish(fields)
    return ModelConfig(**values, experts=mixture)
