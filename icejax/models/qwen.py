"""Qwen2, Qwen2.5, Qwen3 and Qwen3's mixtures of experts, and what has their architecture (DeepSeek-R1-Distill-Qwen)."""

from __future__ import annotations

from typing import Any

from icejax import ranges
from icejax.config import ModelConfig
from icejax.models.fields import Fields
from icejax.models.hf_config import common, experts, finish, layer_types


def read_qwen2_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen2` checkpoint: biased q, k and v."""
    return _read(raw, lambda fields: dict(qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False))


def read_qwen3_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen3` checkpoint: normed q and k, head_dim 128 unless said."""

    def attention(fields) -> dict[str, Any]:
        bias = fields.take("attention_bias", bool, default=False)
        return dict(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=True)

    return _read({"head_dim": 128, **raw}, attention)


def read_qwen3_moe_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen3_moe` checkpoint: heads share the hidden size unless said, a window is on every layer."""
    fields, values = common(raw)
    bias = fields.take("attention_bias", bool, default=False)
    values |= dict(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=True)
    window = fields.whole("sliding_window", default=4096) if fields.take("use_sliding_window", bool, default=False) else None
    fields.whole("max_window_layers", least=0, default=0)  # transformers gives all layers the window whatever it says
    values |= layer_types(fields, values["num_hidden_layers"], window=window, first_sliding=0)
    values |= _sparse(fields, values["num_hidden_layers"])
    finish(fields)
    return ModelConfig(**values)


def _sparse(fields: Fields, layers: int) -> dict[str, Any]:
    """Returns the experts, and which layers have none: those named, and all but every `decoder_sparse_step`th."""
    given = fields.take("mlp_only_layers", list, default=[])
    named = {ranges.whole(f"{fields.source}: 'mlp_only_layers'", each, least=0, most=layers - 1) for each in given}
    step = fields.whole("decoder_sparse_step", default=1)
    found = experts(
        fields,
        count="num_local_experts" if "num_local_experts" in fields.raw else "num_experts",  # as transformers 5 writes it, and 4
        size="moe_intermediate_size",
        normed=fields.take("norm_topk_prob", bool, default=False),
    )
    return dict(experts=found, dense_layers=tuple(i for i in range(layers) if i in named or (i + 1) % step))


def _read(raw: dict[str, Any], attention) -> ModelConfig:
    fields, values = common(raw)
    slides = fields.take("use_sliding_window", bool, default=False)
    window = fields.whole("sliding_window", default=4096) if slides else None
    first = fields.whole("max_window_layers", least=0, default=28)
    values |= attention(fields) | layer_types(fields, values["num_hidden_layers"], window=window, first_sliding=first)
    finish(fields)
    return ModelConfig(**values)
