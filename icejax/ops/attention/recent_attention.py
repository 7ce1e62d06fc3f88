"""Sums of attention weights by key, over the last queries of a prompt; SnapKV, TOVA, H2O and RestKV rank keys by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import BLOCK, EINSUM, Scoring


def recent_attention_sums(
    q: Float[Array, "B W N H"],
    lse: Float[Array, "B W N"],
    k: Float[Array, "B K S H"],
    *,
    asking: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    scoring: Scoring,
) -> Float[Array, "B K G S"]:
    """Returns the attention weights of each key, summed over W queries that see the keys up to their position, in fp32.

    Runs in blocks of keys.

    Args:
        lse: log-sum-exp of each query's scores.
        asking: positions of the queries; -1 for a missing query.
        positions: positions of the keys; -1 for an empty slot.
    """
    batch, count, _, size = q.shape
    heads, slots = k.shape[1:3]
    q = q.reshape(batch, count, heads, -1, size)
    lse = lse.reshape(batch, count, heads, -1).transpose(0, 2, 3, 1)[..., None]  # B K G W 1

    def key_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        keys, key_position = block
        seen = (key_position[:, :, None, None, :] >= 0) & (key_position[:, :, None, None, :] <= asking[:, None, None, :, None])
        scores = scoring(EINSUM("bwkgh,bksh->bkgws", q, keys))
        return jnp.where(seen, jnp.exp(scores - lse), 0.0).sum(3)

    block = min(BLOCK, slots)
    padding = -slots % block
    k = jnp.pad(k, ((0, 0), (0, 0), (0, padding), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, 0), (0, padding)), constant_values=-1)
    parts = tuple(x.reshape(batch, heads, -1, block, *x.shape[3:]).swapaxes(0, 2).swapaxes(1, 2) for x in (k, positions))
    weights = lax.map(key_block, parts)  # [blocks, B, K, G, block]
    return jnp.moveaxis(weights, 0, 3).reshape(batch, heads, -1, slots + padding)[..., :slots]
