"""The walk over a model's layers; what attends in each of them is its caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.models.decoder import DecoderLayer
from icejax.ops.attention import causal

Kept = TypeVar("Kept")


def exact(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    lengths: Int[Array, " B"],
    keep: Callable[[jax.Array, jax.Array, jax.Array], Kept],
) -> tuple[Float[Array, "B T D"], Kept]:
    """Runs a layer over right-padded texts from their beginning, where a token attends to all that the layer lets it see.

    Args:
        lengths: tokens of each row.
        keep: what is made of the queries [B, T, N, H], keys and values [B, T, K, H], beside attending.

    Returns:
        The layer's output, and what `keep` returned.
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None, :], x.shape[:2])
    q, k, v = layer.enter(x, positions, lengths)
    with jax.named_scope("attend"):
        attended = causal(q, k, v, lengths=lengths, window=layer.window)
    kept = keep(q, k, v)
    return layer.leave(x, attended), kept
