"""gpt-oss 20B and 120B, in bf16 or with experts in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from icejax.config import ExpertForm, ModelConfig
from icejax.models.hf.hf_config import SOFTMAX, common, experts, finish, layer_types

# Parts of parameter names: ours, and those of the family's checkpoints.
RENAMED = (("mlp.gate.", "mlp.router."),)
# Defaults of transformers for fields that a config lacks.
YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096)
DEFAULTS = dict(head_dim=64, rope_theta=150000.0, rms_norm_eps=1e-5, max_position_embeddings=131072)
LIMIT = dict(least=0, most=1e6, above=True)


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `gpt_oss` checkpoint: attention sinks, and every second layer slides."""
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = raw | {"rope_scaling": YARN}
    fields, values = common(DEFAULTS | raw)
    bias, layers = fields.take("attention_bias", bool, default=True), values["num_hidden_layers"]
    values |= dict(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=None, norm="wide", sinks=True)
    values |= layer_types(fields, layers, window=fields.whole("sliding_window", default=128), sliding=range(0, layers, 2))
    limit, alpha = (fields.number(f"swiglu_{x}", **LIMIT, default=y) for x, y in (("limit", 7.0), ("alpha", 1.702)))
    # A softmax over the chosen logits equals the softmax over all logits, normalised over the chosen.
    mixture = experts(fields, count="num_local_experts", size="intermediate_size", routing=replace(SOFTMAX, biased=True))
    mixture = replace(mixture, form=ExpertForm(limit=limit, alpha=alpha, biased=True))
    finish(fields)
    return ModelConfig(**values, experts=mixture)
