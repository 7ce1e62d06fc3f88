"""Cache policies by the name the command line knows them by."""

from __future__ import annotations

import logging

from icejax.cache.clustered import Clustered
from icejax.cache.full import Full, Ring
from icejax.cache.policy import CachePolicy
from icejax.config import ModelConfig

LOG = logging.getLogger(__name__)

POLICIES: dict[str, type[CachePolicy]] = {
    "clustered": Clustered,
    "full": Full,
}


def name_of(policy: CachePolicy) -> str | None:
    """Returns the name that the class of `policy` is registered by; None if it is not."""
    return next((name for name, kind in POLICIES.items() if kind is type(policy)), None)


def layer_policies(policy: CachePolicy, config: ModelConfig, *, capacity: int) -> tuple[CachePolicy, ...]:
    """Returns the policy of every layer: a ring for sliding layers, `Full` for the first dense layers, else `policy`.

    A window that holds all of `capacity` tokens slides over nothing: such layers count as full attention.
    """
    dense = policy.dense_layers
    if dense is None:
        dense = 2 if config.num_hidden_layers >= 16 else 0
    policies = tuple(
        Ring(window) if window is not None and window < capacity else Full() if i < dense else policy
        for i, window in enumerate(config.windows)
    )
    if policy not in policies:
        LOG.warning("every layer has a sliding window or is dense: the %s cache is not used", type(policy).__name__.lower())
    return policies
