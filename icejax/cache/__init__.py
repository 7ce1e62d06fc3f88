"""Cache policies by the name the command line knows them by."""

from __future__ import annotations

from icejax.cache.clustered import Clustered
from icejax.cache.full import Full, Ring
from icejax.cache.policy import CachePolicy
from icejax.config import ModelConfig

POLICIES: dict[str, type[CachePolicy]] = {
    "clustered": Clustered,
    "full": Full,
}


def layer_policies(policy: CachePolicy, config: ModelConfig) -> tuple[CachePolicy, ...]:
    """Returns the policy of every layer: a ring for sliding layers, `Full` for the first dense layers, else `policy`."""
    dense = policy.dense_layers
    if dense is None:
        dense = 2 if config.num_hidden_layers >= 16 else 0
    ring = Ring(config.sliding_window) if config.sliding_window is not None else None
    return tuple(
        ring if kind == "sliding_attention" else Full() if i < dense else policy for i, kind in enumerate(config.layer_types)
    )
