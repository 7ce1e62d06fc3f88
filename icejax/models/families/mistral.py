"""Mistral 7B v0.1 to v0.3, Codestral-22B, Mistral-Nemo, Ministral and Ministral 3, and the mixtures of Mistral 4."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.families.deepseek import latent, mixture
from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import SOFTMAX, common, finish, layer_types

# The scaling of queries, and an unused number among the rope fields.
YARN_FIELDS = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `mistral` or `ministral` checkpoint; all layers slide if there is a window (v0.1)."""
    # transformers' default for an absent field; v0.2 and later write null.
    fields, values = common(raw if "sliding_window" in raw else raw | {"sliding_window": 4096})
    return _read(fields, values, range(values["num_hidden_layers"]))


def read_ministral3_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `ministral3` checkpoint: queries are scaled by position, head_dim is 128 by default."""
    fields, values = common({"head_dim": 128, "rms_norm_eps": 1e-5, **raw}, yarn_fields=YARN_FIELDS)
    fields.take("rope_parameters", dict)  # required: transformers defaults to the fields of one checkpoint
    return _read(fields, values, None)


def read_mistral4_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `mistral4` checkpoint: latent attention, queries scaled by position, softmax router."""
    fields, values = latent({"first_k_dense_replace": 0, **raw}, of_whole=True, yarn_fields=YARN_FIELDS)
    fields.take("rope_parameters", dict)
    values |= mixture(fields, values["num_hidden_layers"], routing=SOFTMAX)
    finish(fields)
    return ModelConfig(**values)


def _read(fields: Fields, values: dict[str, Any], sliding: range | None) -> ModelConfig:
    values |= dict(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=None)
    window, layers = fields.whole("sliding_window", default=None), values["num_hidden_layers"]
    values |= layer_types(fields, layers, window=window, sliding=sliding)
    finish(fields)
    return ModelConfig(**values)
