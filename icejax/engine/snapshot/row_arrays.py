"""The arrays of a row's cache in a file: their names, dtypes and shapes, and the pages of the pool extent by extent.

Example: a row with 150 pages is saved as `pool.0` with 64 pages, `pool.1` with 64 and `pool.2` with 22. If the cache has codes
of its pages, the file also has `pool.0.codes`, `pool.1.codes` and `pool.2.codes`. Arrays hold all KV heads, whatever the number
of devices; at most one extent of the pool is put together at a time. Of a KV head that several devices hold, the copy of the
first of them is saved.
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
from icejax.cache.shares import saved_spec
from icejax.engine.plan import Plan
from icejax.engine.snapshot.array_names import named_arrays
from icejax.runtime.mesh import holders, home

Kinds = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def empty_cache(plan: Plan) -> KVCache:
    """Returns shapes and dtypes of the device part of the cache as it is saved, without a table."""

    def init() -> KVCache:
        specs = (saved_spec(plan.spec_of(i), plan.mesh) for i in range(len(plan.policies)))
        layers = tuple(policy.init(spec) for policy, spec in zip(plan.policies, specs, strict=True))
        return KVCache(layers, Lengths.none(plan.spec.batch_size))

    return jax.eval_shape(init)


def cache_kinds(cache: KVCache) -> Kinds:
    """Returns dtype and shape, by name, of a cache's arrays outside the pool."""
    return {f"cache.{name}": (str(x.dtype), x.shape) for name, x in named_arrays(cache)}


def pool_kinds(plan: Plan, pages: int) -> Kinds:
    """Returns dtype and shape, by name, of the arrays that hold a row's first `pages` pages."""
    if not plan.pooled:
        return {}
    shape, *kind = plan.pool_sizes(1)
    shapes = pool_shapes((*shape[:3], saved_spec(plan.spec, plan.mesh).num_kv_heads, *shape[4:]), *kind)
    arrays = [(count, *named) for extent, count in saved_extents(pages) for named in _named(extent, shapes)]
    return {name: (str(x.dtype), (x.shape[1], count, *x.shape[3:])) for count, name, x in arrays}


def saved_extents(pages: int) -> list[tuple[str, int]]:
    """Returns the name and number of pages of each extent in which a row's first `pages` pages are saved."""
    return [(f"pool.{i}", min(host_pool.EXTENT, pages - i * host_pool.EXTENT)) for i in range(extents_for(pages))]


def _named(name: str, arrays: Any) -> list[tuple[str, Any]]:
    """Returns pages, and their codes if there are any, by the names under which an extent `name` is saved."""
    return list(zip((name, f"{name}.codes"), jax.tree.leaves(arrays), strict=False))


def array_out(x: jax.Array, saved: jax.ShapeDtypeStruct, plan: Plan) -> np.ndarray:
    """Returns an array of a row's cache as it is saved, without copies."""
    axes = [axis for axis, sizes in enumerate(zip(x.shape, saved.shape, strict=True)) if sizes[0] != sizes[1]]
    if not axes:
        return np.asarray(x)
    [axis] = axes  # of its KV heads
    return _first_copies(np.asarray(x), axis, plan)


def _first_copies(x: np.ndarray, axis: int, plan: Plan) -> np.ndarray:
    """Returns the parts of an array, along an axis, that are no copies of the one before."""
    count = holders(plan.mesh, latent=plan.spec.latent)
    if count == 1:
        return x
    shape = (plan.mesh.size // count, count, x.shape[axis] // plan.mesh.size)
    return x.take(np.arange(x.shape[axis]).reshape(shape)[:, 0].ravel(), axis)


def arrays_in(arrays: Any, plan: Plan, cuts: Any) -> Any:
    """Returns saved arrays of a row's cache on the devices of a plan, where they are cut by `cuts`."""
    count = holders(plan.mesh, latent=plan.spec.latent)
    if count > 1:
        return jax.tree.map(lambda x, cut: plan.mesh.copies(x, cut, count), arrays, jax.tree.broadcast(cuts, arrays))
    # No aliasing: on CPU an array over numpy's memory could not be written in place.
    return jax.device_put(arrays, home(plan.mesh, cuts), may_alias=False)


def pages_out(pool: Pool, extent: int | np.integer, name: str, count: int, *, plan: Plan) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and bits of each array with the first `count` pages of an extent that is saved as `name`."""
    for part, bits in _named(name, host_pool.read_extent(pool, jnp.int32(extent), mesh=plan.mesh)):
        yield part, _first_copies(np.asarray(bits)[:, :count], 2, plan)


def pages_in(pool: Pool, extent: int | np.integer, name: str, read: Callable[[str], np.ndarray], *, plan: Plan) -> Pool:
    """Returns the pool, which it donates, with the first pages of an extent that is saved as `name`.

    Args:
        read: returns an array by its name.
    """

    def filled(part: str) -> np.ndarray:
        pages = read(part)
        bits = np.zeros((len(pages), host_pool.EXTENT, *pages.shape[2:]), pages.dtype)
        bits[:, : pages.shape[1]] = pages
        return bits

    arrays = [arrays_in(filled(part), plan, host_pool.OF_EXTENT) for part, _ in _named(name, pool)]
    bits = jax.tree.unflatten(jax.tree.structure(pool), arrays)
    return host_pool.write_extent(pool, bits, jnp.int32(extent), mesh=plan.mesh)
