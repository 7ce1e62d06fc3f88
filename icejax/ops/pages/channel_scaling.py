"""Channels in which keys are far larger than queries, or far smaller, brought to like size by powers of two.

What a channel of the keys is multiplied by may be taken out of the queries: attention stays as it is, of powers of two bit for
bit. Distances between keys do not, and by them tokens are packed and outliers chosen. Published models have channels of keys
that are far larger than the others (KIVI, arXiv 2402.02750); without this a page is chosen by those alone
(bench/results/pages.md).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LEAST = 1.0  # doublings of keys that a channel is off before anything is done: what models are trained to is left as it is
FEWEST = 16  # tokens; fewer do not tell how large a channel is
ROUNDING = 1e-10  # of a channel's square, which a channel of one number may leave as its variance
MOST = 8  # doublings, or fp16 could not hold the keys


def factors_of(q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], new: Int[Array, " B"]) -> Float[Array, "B K H"]:
    """Returns by which powers of two to multiply the channels of keys, and to divide those of queries; 1 for most.

    With them a channel's queries have the root mean square that its keys have as deviation, but for a factor of all channels
    of a head.

    Args:
        new: tokens of each row; what stands behind them may be anything.
    """
    there = (jnp.arange(k.shape[1])[None] < new[:, None])[:, :, None, None]
    count = jnp.maximum(new, 1).astype(jnp.float32)[:, None, None]
    queries, keys = (jnp.where(there, x, 0).astype(jnp.float32) for x in (q, k))
    of_queries = jnp.square(queries).sum(1).reshape(*k.shape[::2], -1, k.shape[-1]).mean(2)
    mean = keys.sum(1) / count
    of_keys = jnp.where(there, jnp.square(keys - mean[:, None]), 0).sum(1)
    of_keys = jnp.where(of_keys > ROUNDING * jnp.square(mean) * count, of_keys, 0)
    off = 0.25 * (jnp.log2(of_queries) - jnp.log2(of_keys))
    off = jnp.where(jnp.isfinite(off), off, jnp.nan)  # of which there are no doublings
    off -= jnp.nanmedian(off, axis=-1, keepdims=True)
    known = (jnp.abs(off) >= LEAST) & (new >= FEWEST)[:, None, None]
    doublings = jnp.where(known, jnp.clip(jnp.round(off), -MOST, MOST), 0.0)
    return jnp.ldexp(jnp.ones_like(off), doublings.astype(jnp.int32))
