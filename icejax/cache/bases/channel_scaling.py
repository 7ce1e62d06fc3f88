"""Heads whose key channels are of like size, so that distances between keys mean something (`ops.pages.channel_scaling`)."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Array, Float

from icejax.cache.protocol import Heads


def scaled(heads: Heads, factors: Float[Array, "B K H"] | None) -> Heads:
    """Returns the heads with keys multiplied by factors, and queries divided by them; attention is the same."""
    if factors is None:
        return heads
    factors = factors[:, None].astype(heads.k.dtype)
    q = heads.q.reshape(*heads.k.shape[:3], -1, heads.k.shape[-1]) / factors[:, :, :, None]
    return replace(heads, q=q.reshape(heads.q.shape), k=heads.k * factors)
