"""A small test of whether a backend reads exact bits from host memory on this platform; `choose` and `probe` call it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from icejax.runtime import devices
from icejax.runtime.host_reads.backends import BACKENDS, MASKED_BACKENDS


def selftest(name: str) -> str | None:
    """Returns the error of a backend, tried in this process; None if it reads exact bits."""
    pages, wanted = np.asarray([3, 0, 63, 3], np.int32), np.asarray([True, False, True, True])
    tables = [(np.uint16, 2, 16), (np.uint32, 2, 16), (np.uint16, 1, 16)]
    if devices.platform() != "tpu":  # XLA:TPU does not compile reads of 8-bit pages
        tables.append((np.uint8, 2, 18))
    for dtype, planes, height in tables:
        table = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (64, planes, height, 32), dtype=dtype)
        pinned, page_ids = jax.device_put(table, devices.host_sharding()), jnp.asarray(pages)
        try:
            results = [(jax.jit(BACKENDS[name])(pinned, page_ids), table[pages])]
            if name in MASKED_BACKENDS:
                masked = jax.jit(BACKENDS[name])(pinned, page_ids, jnp.asarray(wanted))
                results.append((masked, np.where(wanted[:, None, None, None], table[pages], 0)))
            exact = all(np.array_equal(np.stack(planes_read, axis=1), expected) for planes_read, expected in results)
        except Exception as error:  # a missing or unsuitable compiler may raise any exception
            return f"fails: {(str(error) or type(error).__name__).splitlines()[0]}"
        if not exact:
            return "brings wrong bits"
    return None
