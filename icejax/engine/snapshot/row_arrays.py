"""The arrays of a row's cache in a file: their names, dtypes and shapes, and the pages of the pool extent by extent.

Example: a row with 150 pages is saved as `pool.0` with 64 pages, `pool.1` with 64 and `pool.2` with 22.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import extents_for
from icejax.cache.pool.page_format import bits_dtype
from icejax.cache.protocol import KVCache, Lengths
from icejax.engine.plan import Plan
from icejax.engine.snapshot.array_names import named_arrays

Kinds = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def empty_cache(plan: Plan) -> KVCache:
    """Returns shapes and dtypes of the device part of the cache, without a table."""

    def init() -> KVCache:
        return KVCache(
            tuple(policy.init(plan.spec_of(i)) for i, policy in enumerate(plan.policies)), Lengths.none(plan.spec.batch_size)
        )

    return jax.eval_shape(init)


def cache_kinds(cache: KVCache) -> Kinds:
    """Returns dtype and shape, by name, of a cache's arrays outside the pool."""
    return {f"cache.{name}": (str(x.dtype), x.shape) for name, x in named_arrays(cache)}


def pool_kinds(plan: Plan, pages: int) -> Kinds:
    """Returns dtype and shape, by name, of the arrays that hold a row's first `pages` pages."""
    if not plan.pooled:
        return {}
    shape, bits = plan.pool_shape(1), str(bits_dtype(plan.pool_dtype))
    return {name: (bits, (shape[1], count, *shape[3:])) for name, count in saved_extents(pages)}


def saved_extents(pages: int) -> list[tuple[str, int]]:
    """Returns the name and number of pages of each extent in which a row's first `pages` pages are saved."""
    return [(f"pool.{i}", min(host_pool.EXTENT, pages - i * host_pool.EXTENT)) for i in range(extents_for(pages))]


def pages_out(pool: jax.Array, extent: int, count: int) -> np.ndarray:
    """Returns the bits of the first `count` pages of an extent."""
    return np.asarray(host_pool.read_extent(pool, jnp.int32(extent)))[:, :count]


def pages_in(pool: jax.Array, extent: int, pages: np.ndarray) -> jax.Array:
    """Returns the pool, which it donates, with the bits of the first pages of an extent."""
    bits = np.zeros(pool.shape[1:], pool.dtype)
    bits[:, : pages.shape[1]] = pages
    return host_pool.write_extent(pool, bits, jnp.int32(extent))
