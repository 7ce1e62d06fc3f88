"""Reading runs of pages from a table in host memory: how experts come to the device."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from icejax.runtime.host_reads.backends import BACKENDS, CHOOSING


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
