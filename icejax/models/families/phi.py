"""Phi-3, Phi-3.5 and Phi-4, but for those with experts, images or layers of their own."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf.hf_config import NEUTRAL, common, finish, layer_types

# What its own code once left open, with the only values that transformers knows.
ONLY = NEUTRAL | {
    "attention_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,),
    "mlp_bias": (False,),
}  # fmt: skip
LENGTHS = dict(max_position_embeddings=4096, original_max_position_embeddings=4096)  # where a config does not say


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `phi3` checkpoint: heads rotated in part, a window on every layer."""
    form = raw.get("rope_scaling")
    if isinstance(form, dict) and form.get("type") in ("su", "yarn"):  # what LongRoPE was called in the first of them
        raw = raw | {"rope_scaling": form | {"type": "longrope"}}
    fields, values = common({"rms_norm_eps": 1e-5, **LENGTHS, **raw}, part=1.0)
    values |= dict(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=None)
    layers, window = values["num_hidden_layers"], fields.whole("sliding_window", default=None)
    values |= layer_types(fields, layers, window=window, sliding=None)
    finish(fields, neutral=ONLY)
    return ModelConfig(**values)
