"""Scales the channels of queries and keys by `ops.pages.channel_scaling` factors, before keys are packed or scored.

Called by the clustered policies. With channels of similar size, no few channels dominate the distance between two keys.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Array, Float

from icejax.cache.protocol import Heads


def scaled(heads: Heads, factors: Float[Array, "B K H"] | None) -> Heads:
    """Returns the heads with keys multiplied by `factors` and queries divided by them, so that attention is the same.

    Args:
        factors: powers of two; None: returns the heads as they are.
    """
    if factors is None:
        return heads
    factors = factors[:, None].astype(heads.k.dtype)
    q = heads.q.reshape(*heads.k.shape[:3], -1, heads.k.shape[-1]) / factors[:, :, :, None]
    return replace(heads, q=q.reshape(heads.q.shape), k=heads.k * factors)
