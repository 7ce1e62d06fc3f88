"""Channel scaling: powers of two for the channels where keys are far larger or smaller than queries, to make both similar.

Policies with digests scale a prompt's heads [B, T, N or K, H] by it before they pack and digest. If keys are multiplied and
queries divided by the same power of two, attention stays the same bit for bit. The distances between keys change, and they
decide how tokens are packed and which keys are outliers. Published models have key channels far larger than the others (KIVI,
arXiv 2402.02750); without scaling these channels alone decide which pages are chosen (bench/results/pages.md).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LEAST = 1.0  # doublings from the median channel; a smaller difference is ordinary and is not scaled
FEWEST = 16  # tokens; fewer give no reliable size of a channel
ROUNDING = 1e-10  # of a channel's squared mean: the variance that rounding may leave in a constant channel
MOST = 8  # doublings; more would overflow keys in fp16


def factors_of(q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], new: Int[Array, " B"]) -> Float[Array, "B K H"]:
    """Returns the powers of two by which to multiply key channels and divide query channels; 1 for most channels.

    After scaling, a channel's ratio of query root mean square to key standard deviation is about that of the median channel.
    Queries of size 1 in four channels and keys of deviation 1, 1, 1, 16 give the factors 1, 1, 1, 1/4: in the last channel keys
    then deviate by 4 and queries are 4.

    Args:
        new: real tokens of each row; padding may hold anything.
    """
    valid = (jnp.arange(k.shape[1])[None] < new[:, None])[:, :, None, None]
    count = jnp.maximum(new, 1).astype(jnp.float32)[:, None, None]
    keys = jnp.where(valid, k, 0).astype(jnp.float32)
    query_sizes = query_squares(q, new, kv_heads=k.shape[2])
    mean = keys.sum(1) / count
    key_sizes = jnp.where(valid, jnp.square(keys - mean[:, None]), 0).sum(1)
    key_sizes = jnp.where(key_sizes > ROUNDING * jnp.square(mean) * count, key_sizes, 0)
    off = 0.25 * (jnp.log2(query_sizes) - jnp.log2(key_sizes))
    off = jnp.where(jnp.isfinite(off), off, jnp.nan)  # a channel without queries or keys is not scaled
    off -= jnp.nanmedian(off, axis=-1, keepdims=True)
    scaled = (jnp.abs(off) >= LEAST) & (new >= FEWEST)[:, None, None]
    doublings = jnp.where(scaled, jnp.clip(jnp.round(off), -MOST, MOST), 0.0)
    return jnp.ldexp(jnp.ones_like(off), doublings.astype(jnp.int32))


def query_squares(q: Float[Array, "B T N H"], new: Int[Array, " B"], *, kv_heads: int) -> Float[Array, "B {kv_heads} H"]:
    """Returns the squares of real tokens' queries by channel: sums over tokens, means over the query heads of a KV head.

    Args:
        new: real tokens of each row; padding may hold anything.
    """
    valid = (jnp.arange(q.shape[1])[None] < new[:, None])[:, :, None, None]
    sums = jnp.square(jnp.where(valid, q, 0).astype(jnp.float32)).sum(1)
    return sums.reshape(len(q), kv_heads, -1, q.shape[-1]).mean(2)
