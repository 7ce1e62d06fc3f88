"""DeepSeek-V2, V3 and R1, Kimi-K2; also the readers of latent attention and of DeepSeek's routers, for all families.

The families of GLM and Mistral 4 call `latent` and `mixture`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from icejax.checks import numbers
from icejax.checks.errors import InputError
from icejax.config import Latent, ModelConfig, Routing
from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import (
    MOST_EXPERTS,
    ROTARY_TABLES,
    SIGMOID,
    SOFTMAX,
    common,
    experts,
    finish,
    layer_types,
)

# Parts of parameter names: ours, and those of the family's checkpoints.
RENAMED = (("shared_expert.", "shared_experts."),)
# Defaults of transformers for fields that a config lacks.
V2 = dict(n_shared_experts=2, first_k_dense_replace=0)
V3 = dict(max_position_embeddings=4096, n_group=8, topk_group=4, routed_scaling_factor=2.5, first_k_dense_replace=3)


def ignored_keys(raw: dict[str, Any]) -> re.Pattern[str]:
    """Returns a pattern of checkpoint keys to skip: rotary tables, and multi-token prediction layers after the last layer."""
    first, count = raw["num_hidden_layers"], raw.get("num_nextn_predict_layers") or 0
    layers = "|".join(str(first + i) for i in range(count))
    return re.compile(rf"{ROTARY_TABLES}|model\.layers\.({layers})\..+" if count else ROTARY_TABLES)


def read_v2_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `deepseek_v2` checkpoint: a group of experts is ranked by its best score.

    As in transformers, weights of experts are not normalised, whatever `norm_topk_prob` says.
    """
    if (raw.get("topk_method") or "greedy") == "greedy":
        raw = raw | dict(n_group=1, topk_group=1)  # greedy routing ignores the groups of the config
    fields, values = latent(V2 | raw | dict(rope_interleave=True))  # as in transformers, whatever the config says
    method = fields.take("topk_method", str, default="greedy")
    numbers.one_of("config.json: 'topk_method'", method, ("greedy", "group_limited_greedy"))
    values["mlp_bias"] = fields.take("mlp_bias", bool, default=False)
    values |= mixture(fields, values["num_hidden_layers"], routing=replace(SOFTMAX, group_best=1))
    values["experts"] = replace(values["experts"], routing=replace(values["experts"].routing, normalised=False))
    finish(fields)
    return ModelConfig(**values)


def read_v3_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `deepseek_v3` or `kimi_k2` checkpoint."""
    fields, values = latent(V3 | raw)
    values |= mixture(fields, values["num_hidden_layers"], routing=SIGMOID)
    finish(fields)
    return ModelConfig(**values)


def latent(
    raw: dict[str, Any], *, of_whole: bool = False, yarn_fields: frozenset[str] = frozenset()
) -> tuple[Fields, dict[str, Any]]:
    """Returns what `common` does, for a model with latent attention.

    Args:
        of_whole: whether `partial_rotary_factor` is relative to the whole head; False: relative to the rotated channels.
        yarn_fields: as in `common`.

    Raises:
        InputError: a field is missing, of the wrong type or out of its range.
    """
    early = Fields(raw)
    rotated, plain = (early.whole(name, most=2**12) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
    size = plain + rotated if of_whole else rotated
    part = rotated / size if of_whole else None
    fields, values = common(raw | {"head_dim": size}, part=part, yarn_fields=yarn_fields)
    if values["rotary_dim"] != rotated:
        got = f"got {values['rotary_dim']} of {size} channels"
        raise InputError(f"config.json: partial_rotary_factor must be that of qk_rope_head_dim = {rotated}, {got}")
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if kv_heads != heads:
        raise InputError(
            f"config.json: latent attention has one key per head: expected num_key_value_heads = {heads}, got {kv_heads}"
        )
    config = Latent(
        kv_lora_rank=fields.whole("kv_lora_rank", most=2**16),
        q_lora_rank=fields.whole("q_lora_rank", most=2**16, default=None),
        qk_nope_head_dim=plain,
        v_head_dim=fields.whole("v_head_dim", most=2**12),
    )
    interleaved = fields.take("rope_interleave", bool, default=True)
    bias = fields.take("attention_bias", bool, default=False)
    fields.taken |= early.taken
    values |= dict(num_key_value_heads=1, head_dim=config.kv_lora_rank + rotated, latent=config, rope_interleave=interleaved)
    values |= dict(qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=None)
    return fields, values | layer_types(fields, values["num_hidden_layers"], window=None, sliding=range(0))


def mixture(fields: Fields, layers: int, *, routing: Routing) -> dict[str, Any]:
    """Returns the experts from DeepSeek's config fields, and the dense layers: the first `first_k_dense_replace` of `layers`.

    Args:
        routing: the routing, except for the fields that the config sets.
    """
    groups = fields.whole("n_group", most=MOST_EXPERTS, default=1)
    routing = replace(
        routing,
        groups=groups,
        chosen_groups=fields.whole("topk_group", most=groups, default=1),
        normalised=fields.take("norm_topk_prob", bool, default=True),
        factor=fields.number("routed_scaling_factor", least=0, most=1e6, above=True, default=1.0),
    )
    size = "moe_intermediate_size"
    shared = fields.whole("n_shared_experts", most=MOST_EXPERTS, default=1) * fields.whole(size, most=2**22)
    stack = experts(fields, count="n_routed_experts", size=size, routing=routing, shared=shared)
    dense = fields.whole("first_k_dense_replace", least=0, most=layers, default=1)
    fields.whole("num_nextn_predict_layers", least=0, most=1024, default=0)
    return dict(experts=stack, dense_layers=tuple(range(dense)))
