"""Qwen2, Qwen2.5, Qwen3, their mixtures of experts, and what has their architecture (DeepSeek-R1-Distill-Qwen)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from icejax.checks import numbers
from icejax.config import ModelConfig
from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import NEUTRAL, SOFTMAX, common, experts, finish, layer_types

# What Qwen3-Coder's say of what all of their kind have.
CODER = NEUTRAL | {"qkv_bias": (False,), "shared_expert_intermediate_size": (0,), "use_qk_norm": (True,)}


def read_qwen2_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen2` checkpoint: biased q, k and v."""
    return _read(raw, lambda fields: dict(qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=None), range)


def read_qwen2_moe_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen2_moe` checkpoint: an expert that all tokens share, a window on every second early layer."""

    def attention(fields: Fields) -> dict[str, Any]:
        return dict(qkv_bias=fields.take("qkv_bias", bool, default=True), o_bias=False, mlp_bias=False, qk_norm=None)

    def shared(fields: Fields) -> int:
        return fields.whole("shared_expert_intermediate_size", most=2**22)

    return _read(raw, attention, lambda first, layers: range(0, min(first, layers), 2), shared)


def read_qwen3_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen3` checkpoint: normed q and k, head_dim 128 unless said."""
    return _read({"head_dim": 128, **raw}, _normed, range)


def read_qwen3_moe_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen3_moe` checkpoint: heads share the hidden size unless said, a window is on every layer."""
    return _read(raw, _normed, None, lambda fields: 0, CODER)


def _normed(fields: Fields) -> dict[str, Any]:
    bias = fields.take("attention_bias", bool, default=False)
    return dict(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm="head")


def _read(
    raw: dict[str, Any],
    attention: Callable[[Fields], dict[str, Any]],
    sliding: Callable[[int, int], range] | None,
    shared: Callable[[Fields], int] | None = None,
    neutral: Mapping[str, tuple] = NEUTRAL,
) -> ModelConfig:
    """Returns a config.

    Args:
        attention: reads which projections have a bias or a norm.
        sliding: `max_window_layers` and the number of layers -> layers that slide, where layers do and are not listed; None:
            all of them, whatever is listed.
        shared: reads the size of the shared expert; None: there are no experts.
        neutral: as in `finish`.
    """
    fields, values = common(raw)
    layers = values["num_hidden_layers"]
    slides = fields.take("use_sliding_window", bool, default=False)
    window = fields.whole("sliding_window", default=None if "sliding_window" in raw else 4096) if slides else None
    first = fields.whole("max_window_layers", least=0, default=28)
    near = None if sliding is None else sliding(first, layers)
    values |= attention(fields) | layer_types(fields, layers, window=window, sliding=near)
    if shared is not None:
        values |= _mixture(fields, layers, shared(fields))
    finish(fields, neutral=neutral)
    return ModelConfig(**values)


def _mixture(fields: Fields, layers: int, shared: int) -> dict[str, Any]:
    """Returns the experts, and which layers have none: those named, and all but every `decoder_sparse_step`th."""
    given = fields.take("mlp_only_layers", list, default=[])
    named = {numbers.integer(f"{fields.source}: 'mlp_only_layers'", each, least=0, most=layers - 1) for each in given}
    step = fields.whole("decoder_sparse_step", default=1)
    found = experts(
        fields,
        count="num_local_experts" if "num_local_experts" in fields.raw else "num_experts",  # as transformers 5 writes it, and 4
        size="moe_intermediate_size",
        routing=replace(SOFTMAX, normed=fields.take("norm_topk_prob", bool, default=False)),
        shared=shared,
        shared_gated=bool(shared),
    )
    return dict(experts=found, dense_layers=tuple(i for i in range(layers) if i in named or (i + 1) % step))
