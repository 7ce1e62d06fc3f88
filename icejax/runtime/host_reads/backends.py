"""Backends that read n pages of a table uint[R, planes, rows, W] in host memory, inside a program on the device.

The host pool and the expert reader call them. The result is one array uint[n, rows, W] per plane (keys, values), because
splitting a joint array later would copy it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on as compute_on_module

from icejax.runtime.devices import DEVICE, HOST

PagePlanes = tuple[jax.Array, ...]  # uint[n, rows, W] per plane
# JAX 0.11.1 renamed compute_on2 to compute_on; in older versions compute_on is a context manager.
_compute_on = getattr(compute_on_module, "compute_on2", None) or compute_on_module.compute_on
STARTED = 16  # copies that XLA:TPU starts before it waits for the first
MOST_LOADED = 4096  # elements that a GPU kernel loads into registers at once


def _by_plane(read: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], PagePlanes]:
    """Returns a reader of pages by plane, from a reader of rows of the flat table uint[R * planes, rows, W].

    Example: with 2 planes the keys of pages [3, 0] are the flat rows [6, 0], and their values the rows [7, 1].
    """

    def read_pages(table: jax.Array, pages: jax.Array) -> PagePlanes:
        planes, flat = table.shape[1], table.reshape(-1, *table.shape[2:])
        return tuple(read(flat, planes * pages + plane) for plane in range(planes))

    return read_pages


def _take(table: jax.Array, index: jax.Array) -> jax.Array:
    row_axes = tuple(range(1, table.ndim))
    dimensions = lax.GatherDimensionNumbers(offset_dims=row_axes, collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, index, dimensions, (1, *table.shape[1:]), mode="promise_in_bounds")


def _gather(table: jax.Array, rows: jax.Array) -> jax.Array:
    # Indices go to host memory too: a primitive takes all operands from one memory space.
    return jax.device_put(_take(table, jax.device_put(rows[:, None], HOST)), DEVICE)


def _gather_flat(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Gathers rows as vectors: on CPU many times faster than as [rows, W]. CUDA does not compile it for 8-bit pages."""
    return _gather(table.reshape(len(table), -1), rows).reshape(len(rows), *table.shape[1:])


def _host_compute(table: jax.Array, rows: jax.Array) -> jax.Array:
    run = _compute_on(_take, compute_type="device_host", out_memory_spaces=DEVICE)
    return run(table, jax.device_put(rows[:, None], HOST))


def _slices(table: jax.Array, pages: jax.Array) -> PagePlanes:
    def read_page(_: None, page: jax.Array) -> tuple[None, PagePlanes]:
        loaded = jax.device_put(lax.dynamic_slice_in_dim(table, page, 1, axis=0), DEVICE)
        return None, tuple(loaded[0, plane] for plane in range(table.shape[1]))

    return lax.scan(read_page, None, pages, unroll=min(STARTED, len(pages)))[1]


def _triton(table: jax.Array, pages: jax.Array, wanted: jax.Array | None = None) -> PagePlanes:
    """Loads pages with a Triton kernel through the GPU's unified addresses, a page per program; unwanted pages are zero.

    Values are loaded after keys: both share one bus, and work on the keys can start sooner.
    """
    planes = table.shape[1]
    flat = table.reshape(planes * len(table), -1)
    wanted = jnp.ones(pages.shape, jnp.int32) if wanted is None else wanted.astype(jnp.int32)
    planes_read: list[jax.Array] = []
    for plane in range(planes):
        planes_read.append(_copied(flat, planes * pages + plane, wanted, *planes_read[-1:]))
    return tuple(x.reshape(len(pages), *table.shape[2:]) for x in planes_read)


def _copied(flat: jax.Array, rows: jax.Array, wanted: jax.Array, *before: jax.Array) -> jax.Array:
    """Returns rows of a table uint[R, n], zero where not wanted; runs after the arrays `before` are computed."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    width = flat.shape[1]

    def copy(rows_ref, wanted_ref, flat_ref, *refs) -> None:
        row, is_wanted, out_ref = rows_ref[pl.program_id(0)], wanted_ref[pl.program_id(0)] != 0, refs[-1]

        @pl.when(is_wanted)
        def load() -> None:
            for columns in _parts(width):
                out_ref[0, columns] = flat_ref[row, columns]

        @pl.when(~is_wanted)
        def clear() -> None:
            for columns in _parts(width):
                out_ref[0, columns] = jnp.zeros(columns.size, flat.dtype)

    operands = (rows, wanted, flat, *before)
    return pl.pallas_call(
        copy,
        grid=(len(rows),),
        in_specs=[pl.BlockSpec(x.shape, lambda i, n=x.ndim: (0,) * n) for x in operands],
        out_specs=pl.BlockSpec((1, width), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((len(rows), width), flat.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
    )(*operands)


def _parts(width: int) -> list:
    """Returns slices that cover `width` columns; each has a power of two of columns, as Triton requires of a load.

    Example: 576 columns are cut into 512 and 64.
    """
    from jax.experimental import pallas as pl

    parts, at = [], 0
    while at < width:
        size = min(MOST_LOADED, 1 << ((width - at).bit_length() - 1))
        parts.append(pl.ds(at, size))
        at += size
    return parts


BACKENDS: dict[str, Callable[..., PagePlanes]] = {
    "gather": _by_plane(_gather),
    "gather_flat": _by_plane(_gather_flat),
    "host_compute": _by_plane(_host_compute),
    "slices": _slices,
    "triton": _triton,
}
MASKED_BACKENDS = ("triton",)  # backends that take `wanted` and read no other pages
