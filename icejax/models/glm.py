"""GLM-4.5, 4.6 and 4.7, mixtures of experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from icejax.config import ModelConfig
from icejax.models.hf_config import MOST_EXPERTS, SIGMOID, common, experts, finish, layer_types

# Parts of parameters' names, ours and those of its checkpoints.
RENAMED = (("shared_expert.", "shared_experts."),)


def ignored_keys(raw: dict[str, Any]) -> re.Pattern[str]:
    """Returns what its checkpoints hold behind the last layer: those that guess further tokens, which are not run."""
    first, count = raw["num_hidden_layers"], raw.get("num_nextn_predict_layers") or 0
    return re.compile(rf"model\.layers\.({'|'.join(str(first + i) for i in range(count))})\..+")


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `glm4_moe` checkpoint: half of each head is rotated unless said, a router by DeepSeek-V3."""
    fields, values = common({"rms_norm_eps": 1e-5, **raw}, part=0.5)
    layers = values["num_hidden_layers"]
    values |= dict(
        qkv_bias=fields.take("attention_bias", bool, default=False),
        o_bias=False,
        mlp_bias=False,
        qk_norm="head" if fields.take("use_qk_norm", bool, default=False) else None,
    )
    values |= layer_types(fields, layers, window=None, sliding=range(0))
    groups = fields.whole("n_group", most=MOST_EXPERTS, default=1)
    routing = replace(
        SIGMOID,
        groups=groups,
        chosen_groups=fields.whole("topk_group", most=groups, default=1),
        normed=fields.take("norm_topk_prob", bool, default=True),
        factor=fields.number("routed_scaling_factor", least=0, most=1e6, above=True, default=1.0),
    )
    size = "moe_intermediate_size"
    shared = fields.whole("n_shared_experts", most=MOST_EXPERTS, default=1) * fields.whole(size, most=2**22)
    found = experts(fields, count="n_routed_experts", size=size, routing=routing, shared=shared)
    dense = fields.whole("first_k_dense_replace", least=0, most=layers, default=1)
    fields.whole("num_nextn_predict_layers", least=0, most=1024, default=0)
    finish(fields)
    return ModelConfig(**values, experts=found, dense_layers=tuple(range(dense)))
