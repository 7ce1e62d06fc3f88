"""MiniMax-M2 and its successors, mixtures of experts."""

from __future__ import annotations

from typing import Any

from icejax.config import ModelConfig
from icejax.models.families import mixtral
from icejax.models.hf.fields import Fields
from icejax.models.hf.hf_config import SIGMOID, common, experts, finish, layer_types

# Parts of parameter names: ours, and those of the family's checkpoints.
RENAMED = (("mlp.gate.e_score", "block_sparse_moe.e_score"), *mixtral.RENAMED)


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """Returns the config of a `minimax_m2` checkpoint: q and k have one norm over all heads, and are rotated in part."""
    early = Fields(raw)
    size = early.whole("head_dim", most=2**12, default=128)
    rotated = early.whole("rotary_dim", least=4, most=size, default=size)
    fields, values = common({"head_dim": 128, "rope_theta": 5e6, **raw}, part=rotated / size)
    fields.taken.add("rotary_dim")
    values |= dict(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm="all")
    values |= layer_types(fields, values["num_hidden_layers"], window=None, sliding=range(0))
    mixture = experts(fields, count="num_local_experts", size="intermediate_size", routing=SIGMOID)
    finish(fields)
    return ModelConfig(**values, experts=mixture)
