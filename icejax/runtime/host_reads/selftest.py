"""A small test of a way to read host memory: whether it brings exact bits on this platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from icejax.runtime import devices
from icejax.runtime.host_reads.backends import BACKENDS, CHOOSING


def selftest(name: str) -> str | None:
    """Returns what is wrong with a backend, tried in this process; None if it brings exact bits."""
    pages, wanted = np.asarray([3, 0, 63, 3], np.int32), np.asarray([True, False, True, True])
    tables = [(np.uint16, 2, 16), (np.uint32, 2, 16), (np.uint16, 1, 16)]
    if devices.platform() != "tpu":  # where pages of int8 do not compile
        tables.append((np.uint8, 2, 18))
    for dtype, planes, height in tables:
        table = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (64, planes, height, 32), dtype=dtype)
        pinned, index = jax.device_put(table, devices.host_sharding()), jnp.asarray(pages)
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
