"""Ways of reading rows of a table [R, p, H] in host memory inside a program, and the choice of one that brings exact bits."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import compute_on as compute_on_module
from jax.sharding import SingleDeviceSharding

from icejax.errors import InputError

LOG = logging.getLogger(__name__)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
CHOICE = "ICEJAX_FETCH_BACKEND"  # the environment's own choice of backend
# Renamed in JAX 0.11.1; the context manager that bore the name before is not what is wanted here.
_compute_on = getattr(compute_on_module, "compute_on2", None) or compute_on_module.compute_on


def _take(table: jax.Array, index: jax.Array) -> jax.Array:
    kept = tuple(range(1, table.ndim))
    numbers = lax.GatherDimensionNumbers(offset_dims=kept, collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, index, numbers, (1, *table.shape[1:]), mode="promise_in_bounds")


def _gather(table: jax.Array, rows: jax.Array) -> jax.Array:
    # Indices go to host memory too: a primitive takes its operands from one memory space.
    return jax.device_put(_take(table, jax.device_put(rows[:, None], HOST)), DEVICE)


def _gather_flat(table: jax.Array, rows: jax.Array) -> jax.Array:
    """On CPU a gather of [p, H] takes many times as long; on CUDA this one does not compile for pages of int8."""
    return _gather(table.reshape(len(table), -1), rows).reshape(len(rows), *table.shape[1:])


def _host_compute(table: jax.Array, rows: jax.Array) -> jax.Array:
    run = _compute_on(_take, compute_type="device_host", out_memory_spaces=DEVICE)
    return run(table, jax.device_put(rows[:, None], HOST))


def _slices(table: jax.Array, rows: jax.Array) -> jax.Array:
    def one(_: None, row: jax.Array) -> tuple[None, jax.Array]:
        return None, jax.device_put(lax.dynamic_slice_in_dim(table, row, 1, axis=0), DEVICE)

    return lax.scan(one, None, rows)[1].reshape(len(rows), *table.shape[1:])


def _triton(table: jax.Array, rows: jax.Array) -> jax.Array:
    """A kernel that loads the rows through the GPU's unified addresses; each program copies a power of two of columns."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    width = math.prod(table.shape[1:])
    part = min(width & -width, 4096)
    flat = table.reshape(-1, width)

    def copy(rows_ref, table_ref, out_ref) -> None:
        columns = pl.ds(pl.program_id(1) * part, part)
        out_ref[0] = table_ref[rows_ref[pl.program_id(0)], columns]

    copied = pl.pallas_call(
        copy,
        grid=(len(rows), width // part),
        in_specs=[pl.BlockSpec(rows.shape, lambda i, j: (0,)), pl.BlockSpec(flat.shape, lambda i, j: (0, 0))],
        out_specs=pl.BlockSpec((1, part), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((len(rows), width), table.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
    )(rows, flat)
    return copied.reshape(len(rows), *table.shape[1:])


BACKENDS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "gather": _gather,
    "gather_flat": _gather_flat,
    "host_compute": _host_compute,
    "slices": _slices,
    "triton": _triton,
}
# On TPU XLA refuses a gather from host memory, copies of one-dimensional slices are direct, and to flatten the rows would copy
# the table. The kernel comes last on CUDA until it has been timed there: a fault in it would take the process along.
ORDER = {
    "tpu": ("slices", "host_compute"),
    "gpu": ("gather", "host_compute", "slices", "triton"),
    "cpu": ("gather_flat", "host_compute", "slices"),
}


def fault(name: str) -> str | None:
    """Returns what is wrong with a backend on this platform, found by a small test; None if it brings exact bits."""
    rows = np.asarray([3, 0, 63, 3], np.int32)
    tables = [(np.uint16, 16), (np.uint32, 16)]
    if jax.default_backend() != "tpu":  # where pages of int8 do not compile
        tables.append((np.uint8, 18))
    for dtype, height in tables:
        table = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (64, height, 32), dtype=dtype)
        pinned = jax.device_put(table, sharding(host=True))
        try:
            exact = np.array_equal(jax.jit(BACKENDS[name])(pinned, jnp.asarray(rows)), table[rows])
        except Exception as error:  # a compiler that is not there, or not made for this, raises nearly anything
            return f"fails: {(str(error) or type(error).__name__).splitlines()[0]}"
        if not exact:
            return "brings wrong bits"
    return None


def candidates() -> tuple[str, ...]:
    """Returns the backends that may be used on this platform, best first.

    Raises:
        InputError: the environment names one that there is not.
    """
    platform = jax.default_backend()
    order = ORDER.get(platform, ("gather", "host_compute", "slices"))
    name = os.environ.get(CHOICE)
    if name is None:
        return order
    if name not in order:
        raise InputError(f"{CHOICE} must be one of {', '.join(order)} on {platform}, got {name!r}")
    return (name,)


@functools.cache
def fetch_backend() -> str:
    """Returns the first backend that brings exact bits on this platform, and logs it.

    Raises:
        InputError: there is none.
    """
    platform = jax.default_backend()
    for name in candidates():
        reason = fault(name)
        if reason is None:
            LOG.info("fetch backend on %s: %s", platform, name)
            return name
        LOG.warning("fetch backend %s on %s %s", name, platform, reason)
    if CHOICE in os.environ:
        raise InputError(f"{CHOICE}={os.environ[CHOICE]} does not work on {platform}: unset it, or use --cache full")
    raise InputError(f"host memory cannot be read inside a program on {platform}: use --cache full")


def sharding(*, host: bool) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host" if host else None)
