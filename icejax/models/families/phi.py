"""Phi-3, Phi-3.5 and Phi-4, except models with experts, images or a layer type of their own."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf.hf_config import common, finish, layer_types

LENGTHS = dict(max_position_embeddings=4096, original_max_position_embeddings=4096)  # defaults


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `phi3` checkpoint: heads may be rotated in part, all layers slide if there is a window."""
    form = raw.get("rope_scaling")
    if isinstance(form, dict) and form.get("type") in ("su", "yarn"):  # names of LongRoPE in the first Phi-3 configs
        raw = raw | {"rope_scaling": form | {"type": "longrope"}}
    fields, values = common({"rms_norm_eps": 1e-5, **LENGTHS, **raw}, part=1.0)
    values |= dict(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=None)
    layers, window = values["num_hidden_layers"], fields.whole("sliding_window", default=None)
    values |= layer_types(fields, layers, window=window, sliding=None)
    finish(fields)
    return ModelConfig(**values)
