"""Qwen2, Qwen2.5, Qwen3, their mixtures of experts, and models with their architecture (DeepSeek-R1-Distill-Qwen)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from icejax.checks import numbers
from icejax.config import ModelConfig
from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import SOFTMAX, common, experts, finish, layer_types


def read_qwen2_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen2` checkpoint: projections of q, k and v have a bias."""
    return _read(raw, lambda fields: dict(qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=None), range)


def read_qwen2_moe_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen2_moe` checkpoint: a shared expert, and a window on every second early layer."""

    def attention(fields: Fields) -> dict[str, Any]:
        return dict(qkv_bias=fields.take("qkv_bias", bool, default=True), o_bias=False, mlp_bias=False, qk_norm=None)

    def shared(fields: Fields) -> int:
        return fields.whole("shared_expert_intermediate_size", most=2**22)

    return _read(raw, attention, lambda first, layers: range(0, min(first, layers), 2), shared)


def read_qwen3_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen3` checkpoint: q and k have norms, head_dim is 128 by default."""
    return _read({"head_dim": 128, **raw}, _normed, range)


def read_qwen3_moe_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `qwen3_moe` checkpoint: head_dim is hidden size / heads by default, a window is on all layers."""
    return _read(raw, _normed, None, lambda fields: 0)


def _normed(fields: Fields) -> dict[str, Any]:
    bias = fields.take("attention_bias", bool, default=False)
    return dict(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm="head")


def _read(
    raw: dict[str, Any],
    attention: Callable[[Fields], dict[str, Any]],
    sliding: Callable[[int, int], range] | None,
    shared: Callable[[Fields], int] | None = None,
) -> ModelConfig:
    """Returns the config of any Qwen family.

    Args:
        attention: fields -> the ModelConfig fields of biases and norms in attention.
        sliding: (`max_window_layers`, number of layers) -> the sliding layers, if there is a window and no list of layer types;
            None: all layers.
        shared: fields -> size of the shared expert, 0 without one; None: the family has no experts.
    """
    fields, values = common(raw)
    layers = values["num_hidden_layers"]
    slides = fields.take("use_sliding_window", bool, default=False)
    window = fields.whole("sliding_window", default=None if "sliding_window" in raw else 4096) if slides else None
    first = fields.whole("max_window_layers", least=0, default=28)
    sliding_layers = None if sliding is None else sliding(first, layers)
    values |= attention(fields) | layer_types(fields, layers, window=window, sliding=sliding_layers)
    if shared is not None:
        values |= _mixture(fields, layers, shared(fields))
    finish(fields)
    return ModelConfig(**values)


def _mixture(fields: Fields, layers: int, shared: int) -> dict[str, Any]:
    """Returns the experts and the dense layers: `mlp_only_layers`, and all but every `decoder_sparse_step`th layer.

    Example: of 6 layers with a step of 2 and [1] in `mlp_only_layers`, layers 0, 1, 2 and 4 are dense.
    """
    listed = fields.take("mlp_only_layers", list, default=[])
    dense = {numbers.integer(f"{fields.source}: 'mlp_only_layers'", index, least=0, most=layers - 1) for index in listed}
    step = fields.whole("decoder_sparse_step", default=1)
    mixture = experts(
        fields,
        count="num_experts" if fields.raw.get("num_local_experts") is None else "num_local_experts",  # of transformers 4, of 5
        size="moe_intermediate_size",
        routing=replace(SOFTMAX, normalised=fields.take("norm_topk_prob", bool, default=False)),
        shared=shared,
        shared_gated=bool(shared),
    )
    return dict(experts=mixture, dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step))
