"""The choice of a way to read host memory inside a program: the first that brings exact bits."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from icejax import memory
from icejax.cache import probe
from icejax.cache.backends import BACKENDS, CHOOSING
from icejax.checks.errors import InputError

LOG = logging.getLogger(__name__)
CHOICE = "ICEJAX_FETCH_BACKEND"  # the environment's own choice of backend
# On TPU XLA refuses a gather from host memory, copies of one-dimensional slices are direct, and to flatten the rows would copy
# the table. On CUDA a kernel crosses the bus once and stays in the step's graph; XLA's gather crosses it three times.
ORDER = {
    "tpu": ("slices", "host_compute"),
    "gpu": ("triton", "gather", "host_compute", "slices"),
    "cpu": ("gather_flat", "host_compute", "slices"),
}
APART = ("triton",)  # a fault in a kernel would take the process along, so it is tried in another


def try_ahead() -> None:
    """Tries what is to be tried apart, before JAX starts and unless the environment has chosen something else."""
    probe.ahead([name for name in APART if os.environ.get(CHOICE, name) == name])


def fault(name: str) -> str | None:
    """Returns what is wrong with a backend on this platform, found by a small test; None if it brings exact bits."""
    return probe.found(name) if name in APART else tried(name)


def tried(name: str) -> str | None:
    """Returns `fault`, found in this process."""
    pages, wanted = np.asarray([3, 0, 63, 3], np.int32), np.asarray([True, False, True, True])
    tables = [(np.uint16, 2, 16), (np.uint32, 2, 16), (np.uint16, 1, 16)]
    if memory.platform() != "tpu":  # where pages of int8 do not compile
        tables.append((np.uint8, 2, 18))
    for dtype, planes, height in tables:
        table = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (64, planes, height, 32), dtype=dtype)
        pinned, index = jax.device_put(table, memory.on_host()), jnp.asarray(pages)
        try:
            results = [(jax.jit(BACKENDS[name])(pinned, index), table[pages])]
            if name in CHOOSING:
                some = jax.jit(BACKENDS[name])(pinned, index, jnp.asarray(wanted))
                results.append((some, np.where(wanted[:, None, None, None], table[pages], 0)))
            exact = all(np.array_equal(np.stack(planes, axis=1), expected) for planes, expected in results)
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
    platform = memory.platform()
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
    platform = memory.platform()
    for name in candidates():
        reason = fault(name)
        if reason is None:
            LOG.info("fetch backend on %s: %s", platform, name)
            return name
        LOG.warning("fetch backend %s on %s %s", name, platform, reason)
    if CHOICE in os.environ:
        raise InputError(f"{CHOICE}={os.environ[CHOICE]} does not work on {platform}: unset it, or use --cache full")
    raise InputError(f"host memory cannot be read inside a program on {platform}: use --cache full")


@dataclass(frozen=True)
class Reader:
    """Reads runs of pages of a table of one plane in host memory: what is fetched of experts.

    Attributes:
        backend: the way of reading, a key of `BACKENDS`.
    """

    backend: str

    def __call__(
        self, table: UInt[Array, "R 1 rows W"], runs: Int[Array, "n m"], wanted: Bool[Array, " n"]
    ) -> UInt[Array, "n m rows W"]:
        """Returns the pages of each run, on the device; zeros for runs that are not wanted, which cost nothing."""
        read, shape = BACKENDS[self.backend], (*runs.shape, *table.shape[2:])
        if self.backend in CHOOSING:
            return read(table, runs.reshape(-1), jnp.repeat(wanted, runs.shape[1]))[0].reshape(shape)
        order = jnp.flatnonzero(wanted, size=len(wanted), fill_value=0)

        def one(i: jax.Array, out: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(out, read(table, runs[order[i]])[0], order[i], axis=0)

        return lax.fori_loop(0, wanted.sum(), one, jnp.zeros(shape, table.dtype))
