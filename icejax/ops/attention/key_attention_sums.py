"""Sums of causal attention weights by key, over all queries of a prompt; the H2O policy ranks keys by them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import BLOCK, EINSUM, Scoring


def key_attention_sums(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    lse: Float[Array, "B T N"],
    *,
    lengths: Int[Array, " B"],
    window: int | None,
    scoring: Scoring,
) -> Float[Array, "B N T"]:
    """Returns the causal attention weights of each key, summed over the queries of a right-padded prompt, in fp32.

    These are the scores of H2O (arXiv 2306.14048). Keys past `lengths` get 0. No array of size T x T is made. Padding, NaN
    included, does not reach a sum. `recent_attention_sums` sums over a few queries.

    Args:
        lse: log-sum-exp of the same attention, as `causal` returns it.
        window: newest keys up to itself that a query sees; None: all.
    """
    batch, tokens, heads, size = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    block = math.gcd(BLOCK, tokens)
    # Transposed once for all blocks, so that one product serves all query heads of a KV head.
    q = q.reshape(batch, tokens, kv_heads, group, size).transpose(0, 2, 3, 1, 4)
    lse = lse.reshape(batch, tokens, kv_heads, group).transpose(0, 2, 3, 1)
    k = k.transpose(0, 2, 1, 3)
    end = (lengths.max() + block - 1) // block

    def key_block(j: jax.Array, sums: jax.Array) -> jax.Array:
        keys = lax.dynamic_slice_in_dim(k, j * block, block, axis=2)
        key_position = j * block + jnp.arange(block)

        def query_block(i: jax.Array, total: jax.Array) -> jax.Array:
            queries, norm = (lax.dynamic_slice_in_dim(x, i * block, block, axis=3) for x in (q, lse))
            position = i * block + jnp.arange(block)
            seen = key_position[None, :] <= position[:, None]
            if window is not None:
                seen &= key_position[None, :] > position[:, None] - window
            counts = position[None, :] < lengths[:, None]
            rows = queries.reshape(batch, kv_heads, group * block, size)
            scores = scoring(EINSUM("bkrh,bksh->bkrs", rows, keys)).reshape(*norm.shape, block)
            # Padding is masked after exp: its log-sum-exp may be NaN.
            weights = jnp.where((seen[None] & counts[:, :, None])[:, None, None], jnp.exp(scores - norm[..., None]), 0)
            return total + weights.sum(-2)

        last = end if window is None else jnp.minimum(end, ((j + 1) * block + window - 2) // block + 1)
        total = lax.fori_loop(j, last, query_block, jnp.zeros((batch, kv_heads, group, block)))
        return lax.dynamic_update_slice_in_dim(sums, total, j * block, axis=3)

    sums = lax.fori_loop(0, end, key_block, jnp.zeros(lse.shape))
    return sums.reshape(batch, heads, tokens)
