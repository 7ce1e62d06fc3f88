"""The text models of Gemma 4 without per-layer embeddings (31B, 26B-A4B)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from icejax.checks import numbers
from icejax.checks.errors import InputError, quoted
from icejax.config import ExpertForm, Experts, ModelConfig
from icejax.models.families import gemma
from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import SOFTMAX, check_rotated, common_by_type, experts, finish, layer_types

# Parts of parameter names: ours, and those of the family's checkpoints.
RENAMED = (
    *gemma.RENAMED,
    ("beside.router.weight", "router.proj.weight"),
    ("beside.router.", "router."),
    ("beside.scale", "router.scale"),
    ("beside.experts.", "experts."),
    ("beside.mlp_norm", "post_feedforward_layernorm_1"),
    ("beside.pre_norm", "pre_feedforward_layernorm_2"),
    ("beside.post_norm", "post_feedforward_layernorm_2"),
)
ROPE = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
ONLY = gemma.ONLY | {
    "hidden_size_per_layer_input": (0,), "num_kv_shared_layers": (0,), "use_bidirectional_attention": ("vision",),
}  # fmt: skip


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `gemma4_text` checkpoint: sliding and full layers have heads of different sizes."""
    raw = {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
    } | raw
    early = Fields(raw)
    heads = early.whole("num_attention_heads", most=2**14)
    sliding_sizes = dict(
        head_dim=early.whole("head_dim", most=2**12), num_key_value_heads=early.whole("num_key_value_heads", most=heads)
    )
    layers = early.whole("num_hidden_layers", most=1024)
    values_from_keys = early.take("attention_k_eq_v", bool, default=False)
    types = layer_types(early, layers, window=early.whole("sliding_window", default=512), sliding=_sliding(layers))
    if types["layer_types"][-1] != "full_attention":
        raise InputError("config.json: layer_types must end with full_attention, got sliding_attention")
    full_sizes = _full(early, types["layer_types"], sliding_sizes, values_from_keys)
    ropes = raw.get("rope_parameters") or ROPE
    fields, values = common_by_type(raw | full_sizes | {"rope_parameters": ropes}, full=1e6, sliding=1e4)
    check_rotated(sliding_sizes["head_dim"])
    if heads % sliding_sizes["num_key_value_heads"]:
        raise InputError(
            f"config.json: {heads} attention heads do not divide among {sliding_sizes['num_key_value_heads']} KV heads"
        )
    bias = fields.take("attention_bias", bool, default=False)
    values |= types | dict(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        qk_norm="head",
        v_norm=True,
        values_from_keys=values_from_keys,
        norm="wide",
        norm_places="both",
        hidden_act="gelu_pytorch_tanh",
        embed_scale=values["hidden_size"] ** 0.5,
        query_pre_attn_scalar=1.0,
        layer_scalar=True,
        sliding_rope=replace(values["sliding_rope"], size=sliding_sizes["head_dim"]),
        sliding_head_dim=sliding_sizes["head_dim"],
        sliding_key_value_heads=sliding_sizes["num_key_value_heads"],
        final_logit_softcapping=fields.number("final_logit_softcapping", least=0, most=1e6, above=True, default=None),
        experts=_experts(fields) if fields.take("enable_moe_block", bool, default=False) else None,
    )
    fields.taken |= early.taken | {"num_experts", "top_k_experts", "moe_intermediate_size"}
    finish(fields, neutral=ONLY)
    return ModelConfig(**values)


def _sliding(layers: int) -> list[int]:
    """Returns the default sliding layers: every sixth layer and the last one are full. Example: 8 -> [0, 1, 2, 3, 4, 6]."""
    return [i for i in range(layers) if (i + 1) % 6 and i + 1 < layers]


def _full(fields: Fields, types: tuple[str, ...], sliding_sizes: dict[str, int], values_from_keys: bool) -> dict[str, int]:
    """Returns head size and number of KV heads of full-attention layers, by the names of their config fields.

    They come from the `global_` fields, or from `per_layer_config`, as transformers 5 writes them.
    """
    size, count = (fields.whole(name, most=2**14, default=None) for name in ("global_head_dim", "num_global_key_value_heads"))
    defaults = (
        sliding_sizes | dict(head_dim=size or 512) | (dict(num_key_value_heads=count) if values_from_keys and count else {})
    )
    by_layer = fields.take("per_layer_config", dict, default=None)
    if by_layer is None:
        return defaults
    indices = [str(i) for i, kind in enumerate(types) if kind == "full_attention"]
    layer_sizes = {str(layer).lstrip("0") or "0": sizes for layer, sizes in by_layer.items()}  # transformers writes 05 and 11
    first = layer_sizes.get(indices[0]) if len(by_layer) == len(indices) and sorted(layer_sizes) == sorted(indices) else None
    if not isinstance(first, dict) or set(first) - set(sliding_sizes) or any(sizes != first for sizes in layer_sizes.values()):
        raise InputError(
            "config.json: 'per_layer_config' must give all full-attention layers the same head_dim and num_key_value_heads, "
            f"got {quoted(by_layer)}"
        )
    checked = {
        name: numbers.integer(f"config.json, per_layer_config: {name!r}", x, least=1, most=2**14) for name, x in first.items()
    }
    return sliding_sizes | checked


def _experts(fields: Fields) -> Experts:
    names = dict(count="num_experts", size="moe_intermediate_size", chosen="top_k_experts")
    mixture = experts(fields, **names, routing=replace(SOFTMAX, per_expert_scale=True))
    return replace(mixture, form=ExpertForm(act="gelu_pytorch_tanh"), beside=True)
