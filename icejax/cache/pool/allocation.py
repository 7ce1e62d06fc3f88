"""Allocation of the host pool: empty pages in pinned memory, if the machine has room; the engine calls it once per pool."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from icejax.cache.pool.host_pool import BY_HEAD, Pool
from icejax.cache.pool.page_format import pool_bytes, pool_shapes
from icejax.runtime import devices
from icejax.runtime.mesh import Mesh, processes_of, size


def allocate(shape: tuple[int, ...], dtype: str, codes: int = 0, *, limit: int | None = None, mesh: Mesh | None = None) -> Pool:
    """Returns an empty pool of `shape` [E, L, 64, K, planes, rows, W] for pages of `dtype`: the model's, or "int8".

    Args:
        codes: bytes of a page's codes; 0: pages have none.
        limit: the most bytes of host memory to take; None: all free memory.
        mesh: the devices, each of which gets the pages of its KV heads in a pool of its own; None: one device.

    Raises:
        InputError: the machine has too little free memory, or XLA may not pin that much.
    """
    arrays, platform = pool_shapes(shape, dtype, codes), devices.platform()
    if platform == "gpu":
        arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(_addressable(x.shape, x.dtype, size(mesh)), x.dtype), arrays)
    advice = (
        "use a shorter prompt, fewer new tokens, a smaller batch (in a session a smaller context length), a 16-bit --dtype "
        "or (clustered caches, not on TPU) --cache-option page_dtype=int8"
    )
    need = pool_bytes(arrays) // processes_of(mesh)  # each has the shares of its own devices, in its own host's memory
    devices.check_room("the cache needs", need, advice=advice, limit=limit)
    if platform == "cpu":  # later programs cannot write in place to an array over NumPy's memory
        return jax.tree.map(lambda x: _zeros(x.shape, x.dtype, mesh)(), arrays)
    if mesh is not None:
        return jax.tree.map(lambda x: mesh.zeros_on_host(x.shape, x.dtype, BY_HEAD), arrays)
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), devices.host_sharding()), arrays)


@functools.lru_cache(maxsize=16)  # a new function would be compiled again
def _zeros(shape: tuple[int, ...], bits: np.dtype, mesh: Mesh | None) -> Callable[[], jax.Array]:
    sharding = devices.host_sharding() if mesh is None else mesh.sharding(BY_HEAD, on_host=True)
    return jax.jit(lambda: jax.device_put(jnp.zeros(shape, bits), devices.HOST), out_shardings=sharding)


def _addressable(shape: tuple[int, ...], bits: np.dtype, count: int = 1) -> tuple[int, ...]:
    """Returns `shape`, with more extents for a pool of bytes between 2 and 4 GiB, whose kernel offsets would overflow.

    `count` devices each have an equal share of the pool.

    Pallas takes 32 bits for the offsets in an array of up to 4 GiB and counts them in elements: too few for 2 GiB of bytes.
    The added extents take the pool over 4 GiB.
    """
    extent = math.prod(shape[1:]) * bits.itemsize // count
    if bits.itemsize > 1 or not 2**31 < shape[0] * extent <= 2**32:
        return shape
    return (2**32 // extent + 1, *shape[1:])
