"""The host pool: pages of keys and values in host memory, written between programs and read inside them.

The pool is one array `uint[P, L, B, K, 2, p, H]` of bit patterns in `pinned_host` memory: XLA:CPU would rewrite a
bf16 update through an fp32 copy of the whole buffer. A program that only reads it never copies it; a program that
writes it takes it by donation and does nothing else with it, because XLA:GPU copies a pool that one program both
reads and writes.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import lax
from jax.experimental import compute_on as compute_on_module
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Int

from icejax.errors import InputError

LOG = logging.getLogger(__name__)
MISSING = 32  # pages that are fetched at once where others are at hand
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# Renamed in JAX 0.11.1; the context manager that bore the name before is not what is wanted here.
_compute_on = getattr(compute_on_module, "compute_on2", None) or compute_on_module.compute_on


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolLayer:
    """One layer's view of the pool, for reading inside a program."""

    pages: jax.Array  # uint[P, L, B, K, 2, p, H], pinned_host
    ended: jax.Array | None  # bool[B], rows that need nothing any more; None: no row
    layer: int = field(metadata=dict(static=True))
    backend: str = field(metadata=dict(static=True))
    dtype: str = field(metadata=dict(static=True))

    def fetch(self, page_ids: Int[Array, "B K M"]) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and the values of pages, dtype[B, K, M, p, H] each, on the device."""
        table, rows = self._table(page_ids)
        # Apart, because to part them later would copy them.
        return tuple(self._values(BACKENDS[self.backend](table, rows + i), page_ids.shape) for i in (0, 1))

    def fetch_missing(
        self, page_ids: Int[Array, "B K M"], held: tuple[jax.Array, jax.Array], held_ids: Int[Array, "B K M"]
    ) -> tuple[tuple[jax.Array, jax.Array], Int[Array, " B"]]:
        """Returns `fetch`, taking what it can from pages `held`, and how many pages came from the host per row.

        Rows that have ended get what is at hand, and cost nothing.
        """
        same = page_ids[..., :, None] == held_ids[..., None, :]
        missing = ~same.any(-1)
        if self.ended is not None:
            missing &= ~self.ended[:, None, None]
        at = same.argmax(-1)[..., None, None]
        start = (jnp.take_along_axis(x, at, axis=2, mode="promise_in_bounds") for x in held)
        table, rows = self._table(page_ids)
        pages = tuple(lax.bitcast_convert_type(x, table.dtype).reshape(-1, table.shape[1]) for x in start)
        # What is missing, in front; behind it page 0 over and over, which may come once more.
        order = jnp.flatnonzero(missing, size=missing.size, fill_value=0)
        block = min(MISSING, missing.size)

        def some(i: jax.Array, pages: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            at = lax.dynamic_slice_in_dim(order, jnp.minimum(i * block, missing.size - block), block)
            return tuple(x.at[at].set(BACKENDS[self.backend](table, rows[at] + j)) for j, x in enumerate(pages))

        pages = lax.fori_loop(0, (missing.sum() + block - 1) // block, some, pages)
        return tuple(self._values(x, page_ids.shape) for x in pages), missing.sum((1, 2), dtype=jnp.int32)

    def _values(self, bits: jax.Array, pages: tuple[int, ...]) -> jax.Array:
        return lax.bitcast_convert_type(bits.reshape(*pages, *self.pages.shape[-2:]), self.dtype)

    def _table(self, page_ids: Int[Array, "B K M"]) -> tuple[jax.Array, jax.Array]:
        """Returns the pool as a table, and the row of every page's keys, behind which its values are."""
        _, layers, batch, heads, _, page_size, size = self.pages.shape
        owner = jnp.arange(batch, dtype=jnp.int32)[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None, :]
        rows = ((page_ids * layers + self.layer) * (batch * heads) + owner[:, :, None]).reshape(-1)
        return self.pages.reshape(-1, page_size * size), 2 * rows


def _gather(table: jax.Array, rows: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    # Indices go to host memory too: a primitive takes its operands from one memory space.
    index = jax.device_put(rows[:, None], HOST)
    return jax.device_put(lax.gather(table, index, numbers, (1, table.shape[1]), mode="promise_in_bounds"), DEVICE)


def _host_compute(table: jax.Array, rows: jax.Array) -> jax.Array:
    def gather(table: jax.Array, index: jax.Array) -> jax.Array:
        numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
        return lax.gather(table, index, numbers, (1, table.shape[1]), mode="promise_in_bounds")

    run = _compute_on(gather, compute_type="device_host", out_memory_spaces=DEVICE)
    return run(table, jax.device_put(rows[:, None], HOST))


def _slices(table: jax.Array, rows: jax.Array) -> jax.Array:
    def one(_: None, row: jax.Array) -> tuple[None, jax.Array]:
        return None, jax.device_put(lax.dynamic_slice_in_dim(table, row, 1, axis=0), DEVICE)

    return lax.scan(one, None, rows)[1].reshape(len(rows), table.shape[1])


BACKENDS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "gather": _gather,
    "host_compute": _host_compute,
    "slices": _slices,
}
# On TPU XLA refuses a gather from host memory, and copies of one-dimensional slices are direct.
ORDER = {"tpu": ("slices", "host_compute"), None: ("gather", "host_compute", "slices")}


@functools.cache
def fetch_backend() -> str:
    """Returns the first backend that brings exact bits on this platform, found by a small test, and logs it."""
    platform = jax.default_backend()
    table = np.random.default_rng(0).integers(0, 2**16, (64, 32), dtype=np.uint16)
    rows = np.asarray([3, 0, 63, 3], np.int32)
    pinned = jax.device_put(table, _sharding(host=True))
    for name in ORDER.get(platform, ORDER[None]):
        try:
            exact = np.array_equal(jax.jit(BACKENDS[name])(pinned, jnp.asarray(rows)), table[rows])
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            LOG.warning("fetch backend %s fails on %s: %s", name, platform, str(error).splitlines()[0])
            continue
        if exact:
            LOG.info("fetch backend on %s: %s", platform, name)
            return name
        LOG.warning("fetch backend %s brings wrong bits on %s", name, platform)
    raise InputError(f"host memory cannot be read inside a program on {platform}: use --cache full")


def _sharding(*, host: bool) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host" if host else None)


def bits_dtype(dtype: str) -> np.dtype:
    """Returns the unsigned integer of the width of `dtype`."""
    return np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def allocate(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns an empty pool of `shape` [P, L, B, K, 2, p, H] for keys and values of `dtype`.

    Raises:
        InputError: the machine has not enough free memory for it, or XLA may not pin so much.
    """
    bits = bits_dtype(dtype)
    need, free = int(np.prod(shape)) * bits.itemsize, psutil.virtual_memory().available
    if need > free:
        raise InputError(
            f"the cache needs {need / 2**30:.1f} GiB of host memory and {free / 2**30:.1f} GiB is free: "
            "use a shorter prompt, fewer new tokens, a smaller batch or a 16-bit --dtype"
        )
    limit = int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")) * 2**30
    if jax.default_backend() == "gpu" and need > limit:
        raise InputError(
            f"the cache needs {need / 2**30:.1f} GiB of pinned memory and XLA takes at most {limit / 2**30:.0f}: "
            f"set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={need // 2**30 + 8}"
        )
    if jax.default_backend() == "cpu":  # an array over numpy's own memory could not be written in place later
        return jax.jit(lambda: jax.device_put(jnp.zeros(shape, bits), HOST), out_shardings=_sharding(host=True))()
    return jax.device_put(np.zeros(shape, bits), _sharding(host=True))


@functools.partial(jax.jit, donate_argnums=0)
def _write(pool: jax.Array, pages: jax.Array, start: tuple[jax.Array, ...]) -> jax.Array:
    bits = lax.bitcast_convert_type(pages, pool.dtype)
    return lax.dynamic_update_slice(pool, jax.device_put(bits, HOST), start)


def write_layer(pool: jax.Array, pages: jax.Array, layer: int, first: jax.Array | int = 0) -> jax.Array:
    """Returns the pool with one layer's pages dtype[P', B, K, 2, p, H] written from page `first`; donates `pool`."""
    zero = np.int32(0)
    return _write(pool, pages[:, None], (jnp.int32(first), np.int32(layer), zero, zero, zero, zero, zero))


def write_pages(pool: jax.Array, pages: jax.Array, first: jax.Array) -> jax.Array:
    """Returns the pool with pages of all layers, dtype[P', L, B, K, 2, p, H], written from page `first`; donates `pool`."""
    zero = np.int32(0)
    return _write(pool, pages, (first, zero, zero, zero, zero, zero, zero))


@functools.partial(jax.jit, static_argnames=("count", "dtype"))
def read_pages(pool: jax.Array, first: jax.Array, *, count: int, dtype: str) -> jax.Array:
    """Returns `count` pages of all layers, dtype[count, L, B, K, 2, p, H], on the device."""
    zero = jax.device_put(jnp.int32(0), HOST)
    start = (jax.device_put(first, HOST), *(zero,) * (pool.ndim - 1))
    return lax.bitcast_convert_type(jax.device_put(lax.dynamic_slice(pool, start, (count, *pool.shape[1:])), DEVICE), dtype)
