"""Ways of reading pages of a table uint[R, planes, rows, W] in host memory inside a program: a plane at a time.

Keys and values come apart, because to part them later would copy them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on as compute_on_module

from icejax.runtime.devices import DEVICE, HOST

PagePlanes = tuple[jax.Array, ...]  # uint[n, rows, W] for every plane
# Renamed in JAX 0.11.1; the context manager that bore the name before is not what is wanted here.
_compute_on = getattr(compute_on_module, "compute_on2", None) or compute_on_module.compute_on
STARTED = 16  # copies that XLA:TPU starts before it awaits the first
MOST_LOADED = 4096  # elements that a GPU program holds in registers at once


def _by_plane(read: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array], PagePlanes]:
    """Returns a way of reading pages from one of reading rows of a table uint[R planes, rows, W]."""

    def every(table: jax.Array, pages: jax.Array) -> PagePlanes:
        planes, flat = table.shape[1], table.reshape(-1, *table.shape[2:])
        return tuple(read(flat, planes * pages + plane) for plane in range(planes))

    return every


def _take(table: jax.Array, index: jax.Array) -> jax.Array:
    kept = tuple(range(1, table.ndim))
    numbers = lax.GatherDimensionNumbers(offset_dims=kept, collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, index, numbers, (1, *table.shape[1:]), mode="promise_in_bounds")


def _gather(table: jax.Array, rows: jax.Array) -> jax.Array:
    # Indices go to host memory too: a primitive takes its operands from one memory space.
    return jax.device_put(_take(table, jax.device_put(rows[:, None], HOST)), DEVICE)


def _gather_flat(table: jax.Array, rows: jax.Array) -> jax.Array:
    """On CPU a gather of [p, W] takes many times as long; on CUDA this one does not compile for pages of int8."""
    return _gather(table.reshape(len(table), -1), rows).reshape(len(rows), *table.shape[1:])


def _host_compute(table: jax.Array, rows: jax.Array) -> jax.Array:
    run = _compute_on(_take, compute_type="device_host", out_memory_spaces=DEVICE)
    return run(table, jax.device_put(rows[:, None], HOST))


def _slices(table: jax.Array, pages: jax.Array) -> PagePlanes:
    def one(_: None, page: jax.Array) -> tuple[None, PagePlanes]:
        whole = jax.device_put(lax.dynamic_slice_in_dim(table, page, 1, axis=0), DEVICE)
        return None, tuple(whole[0, plane] for plane in range(table.shape[1]))

    return lax.scan(one, None, pages, unroll=min(STARTED, len(pages)))[1]


def _triton(table: jax.Array, pages: jax.Array, wanted: jax.Array | None = None) -> PagePlanes:
    """Kernels that load pages through the GPU's unified addresses, a page per program; those not `wanted` are zero.

    Values are loaded after keys: on one bus both together would take as long, and the keys have work waiting for them.
    """
    planes = table.shape[1]
    flat = table.reshape(planes * len(table), -1)
    wanted = jnp.ones(pages.shape, jnp.int32) if wanted is None else wanted.astype(jnp.int32)
    planes_read: list[jax.Array] = []
    for plane in range(planes):
        planes_read.append(_copied(flat, planes * pages + plane, wanted, *planes_read[-1:]))
    return tuple(x.reshape(len(pages), *table.shape[2:]) for x in planes_read)


def _copied(flat: jax.Array, rows: jax.Array, wanted: jax.Array, *before: jax.Array) -> jax.Array:
    """Returns rows of a table uint[R, n], once `before` is there."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    width = flat.shape[1]

    def copy(rows_ref, wanted_ref, flat_ref, *refs) -> None:
        row, there, out_ref = rows_ref[pl.program_id(0)], wanted_ref[pl.program_id(0)] != 0, refs[-1]

        @pl.when(there)
        def load() -> None:
            for columns in _parts(width):
                out_ref[0, columns] = flat_ref[row, columns]

        @pl.when(~there)
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
    """Returns slices that make up `width` columns; each has a power of two of them, as Triton's loads do."""
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
CHOOSING = ("triton",)  # those that can be told which pages are wanted, and read no others
