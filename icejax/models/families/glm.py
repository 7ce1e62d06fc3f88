"""GLM-4.5, 4.6 and 4.7, mixtures of experts, and GLM-4.7-Flash, one with latent attention."""

from __future__ import annotations

from typing import Any

from icejax.checks.errors import InputError, quoted
from icejax.config import ModelConfig
from icejax.models.families.deepseek import latent, mixture
from icejax.models.hf.hf_config import SIGMOID, common, finish, layer_types

MLPS = ("dense", "sparse")


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `glm4_moe` checkpoint: half of each head is rotated by default, DeepSeek-V3's router."""
    fields, values = common({"rms_norm_eps": 1e-5, **raw}, part=0.5)
    layers = values["num_hidden_layers"]
    values |= dict(
        qkv_bias=fields.take("attention_bias", bool, default=False),
        o_bias=False,
        mlp_bias=False,
        qk_norm="head" if fields.take("use_qk_norm", bool, default=False) else None,
    )
    values |= layer_types(fields, layers, window=None, sliding=range(0))
    values |= mixture(fields, layers, routing=SIGMOID)
    finish(fields)
    return ModelConfig(**values)


def read_lite_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `glm4_moe_lite` checkpoint: DeepSeek-V3's attention and router."""
    fields, values = latent({"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, **raw})
    layers = values["num_hidden_layers"]
    values |= mixture(fields, layers, routing=SIGMOID)
    listed, values["dense_layers"] = fields.take("mlp_layer_types", list, default=None), (0,)  # not `first_k_dense_replace`
    if listed is not None:
        if len(listed) != layers or any(kind not in MLPS for kind in listed):
            got = f"{quoted(listed)} ({len(listed)})"
            raise InputError(f"config.json: mlp_layer_types must name dense or sparse for {layers} layers, got {got}")
        values["dense_layers"] = tuple(i for i, kind in enumerate(listed) if kind == "dense")
    finish(fields)
    return ModelConfig(**values)
