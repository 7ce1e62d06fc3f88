"""The arrays of a row's cache in a file: their names, dtypes and shapes, and the pages of the pool extent by extent.

Example: a row with 150 pages is saved as `pool.0` with 64 pages, `pool.1` with 64 and `pool.2` with 22. If the cache has codes
of its pages, `pool.0.codes`, `pool.1.codes` and `pool.2.codes` stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool import host_pool
from icejax.cache.pool.extents import extents_for
from icejax.cache.pool.host_pool import Pool
from icejax.cache.pool.page_format import pool_shapes
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
    shapes = pool_shapes(*plan.pool_sizes(1))
    arrays = [(count, *named) for extent, count in saved_extents(pages) for named in _named(extent, shapes)]
    return {name: (str(x.dtype), (x.shape[1], count, *x.shape[3:])) for count, name, x in arrays}


def saved_extents(pages: int) -> list[tuple[str, int]]:
    """Returns the name and number of pages of each extent in which a row's first `pages` pages are saved."""
    return [(f"pool.{i}", min(host_pool.EXTENT, pages - i * host_pool.EXTENT)) for i in range(extents_for(pages))]


def _named(name: str, arrays: Any) -> list[tuple[str, Any]]:
    """Returns pages, and their codes if there are any, by the names under which an extent `name` is saved."""
    return list(zip((name, f"{name}.codes"), jax.tree.leaves(arrays), strict=False))


def pages_out(pool: Pool, extent: int | np.integer, name: str, count: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and bits of each array with the first `count` pages of an extent that is saved as `name`."""
    for part, bits in _named(name, host_pool.read_extent(pool, jnp.int32(extent))):
        yield part, np.asarray(bits)[:, :count]


def pages_in(pool: Pool, extent: int | np.integer, name: str, read: Callable[[str], np.ndarray]) -> Pool:
    """Returns the pool, which it donates, with the first pages of an extent that is saved as `name`.

    Args:
        read: returns an array by its name.
    """

    def filled(part: str, x: jax.Array) -> np.ndarray:
        bits, pages = np.zeros(x.shape[1:], x.dtype), read(part)
        bits[:, : pages.shape[1]] = pages
        return bits

    arrays = [filled(*pair) for pair in _named(name, pool)]
    return host_pool.write_extent(pool, jax.tree.unflatten(jax.tree.structure(pool), arrays), jnp.int32(extent))
