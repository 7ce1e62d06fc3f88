"""A small test of whether a backend reads exact bits from host memory on this platform; `choose` and `probe` call it."""

from __future__ import annotations

import jax
import numpy as np

from icejax.runtime import devices
from icejax.runtime.host_reads.backends import BACKENDS, MASKED_BACKENDS


def selftest(name: str) -> str | None:
    """Returns the error of a backend, tried in this process; None if it reads exact bits."""
    pages, wanted = np.asarray([3, 0, 63, 3], np.int32), np.asarray([True, False, True, True])
    forms = [(np.uint16, 2, 16), (np.uint32, 2, 16), (np.uint16, 1, 16)]
    if devices.platform() != "tpu":  # XLA:TPU does not compile reads of 8-bit pages
        forms.append((np.uint8, 2, 18))
    random = np.random.default_rng(0)
    tables = [random.integers(0, np.iinfo(dtype).max, (64, *shape, 32), dtype=dtype) for dtype, *shape in forms]
    masks, expected = [()] * len(tables), [table[pages] for table in tables]
    if name in MASKED_BACKENDS:
        masks += [(wanted,)] * len(tables)
        expected += [np.where(wanted[:, None, None, None], table, 0) for table in expected]

    @jax.jit  # one program, which compiles faster than one per table
    def read(tables: list[jax.Array], pages: jax.Array, masks: list[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        return [BACKENDS[name](tables[i % len(tables)], pages, *mask) for i, mask in enumerate(masks)]

    try:
        results = read(jax.device_put(tables, devices.host_sharding()), pages, masks)
        exact = all(np.array_equal(np.stack(planes, axis=1), x) for planes, x in zip(results, expected, strict=True))
    except Exception as error:  # a missing or unsuitable compiler may raise any exception
        return f"fails: {(str(error) or type(error).__name__).splitlines()[0]}"
    return None if exact else "brings wrong bits"
