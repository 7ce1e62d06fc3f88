"""How much a few queries attend to each of many keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import BLOCK, EINSUM, Scoring


def observed(
    q: Float[Array, "B W N H"],
    lse: Float[Array, "B W N"],
    k: Float[Array, "B K S H"],
    *,
    asking: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    scoring: Scoring,
) -> Float[Array, "B K G S"]:
    """Returns the attention weights that keys get in fp32, summed over queries, each of which sees the keys up to itself.

    In blocks of keys.

    Args:
        lse: log-sum-exp of each query's scores.
        asking: positions of the queries; -1 for one that is not there.
        positions: of the keys; -1 for an empty slot.
    """
    batch, count, _, size = q.shape
    heads, slots = k.shape[1:3]
    q = q.reshape(batch, count, heads, -1, size)
    lse = lse.reshape(batch, count, heads, -1).transpose(0, 2, 3, 1)[..., None]  # B K G W 1

    def some(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        keys, where = block
        seen = (where[:, :, None, None, :] >= 0) & (where[:, :, None, None, :] <= asking[:, None, None, :, None])
        scores = scoring(EINSUM("bwkgh,bksh->bkgws", q, keys))
        return jnp.where(seen, jnp.exp(scores - lse), 0.0).sum(3)

    block = min(BLOCK, slots)
    missing = -slots % block
    k = jnp.pad(k, ((0, 0), (0, 0), (0, missing), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
    parts = tuple(x.reshape(batch, heads, -1, block, *x.shape[3:]).swapaxes(0, 2).swapaxes(1, 2) for x in (k, positions))
    weights = lax.map(some, parts)  # blocks, B K G S'
    return jnp.moveaxis(weights, 0, 3).reshape(batch, heads, -1, slots + missing)[..., :slots]
