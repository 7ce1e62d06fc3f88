"""Reads runs of pages from a table in host memory; the checkpoint loader makes one reader for offloaded experts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from icejax.runtime.host_reads.backends import BACKENDS, MASKED_BACKENDS


@dataclass(frozen=True)
class Reader:
    """Reads runs of pages from a table of one plane in host memory; a run holds the pieces of one expert.

    Attributes:
        backend: a key of `BACKENDS`.
    """

    backend: str

    def __call__(
        self, table: UInt[Array, "R 1 rows W"], runs: Int[Array, "n m"], wanted: Bool[Array, " n"]
    ) -> UInt[Array, "n m rows W"]:
        """Returns the pages of each run, on the device; runs that are not wanted are zero and are not read.

        Example: runs [[0, 1], [6, 7]] and wanted [False, True] return zeros and pages 6 and 7, shape [2, 2, rows, W].
        """
        read, shape = BACKENDS[self.backend], (*runs.shape, *table.shape[2:])
        if self.backend in MASKED_BACKENDS:
            return read(table, runs.reshape(-1), jnp.repeat(wanted, runs.shape[1]))[0].reshape(shape)
        order = jnp.flatnonzero(wanted, size=len(wanted), fill_value=0)

        def read_run(i: jax.Array, out: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(out, read(table, runs[order[i]])[0], order[i], axis=0)

        return lax.fori_loop(0, wanted.sum(), read_run, jnp.zeros(shape, table.dtype))
