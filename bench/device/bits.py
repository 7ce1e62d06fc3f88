"""Exactness and speed of every way of reading host memory, on real pages: ``python -m bench.device.bits [--tiny]``.

The output is one JSON line per way (a backend of `icejax.runtime.host_reads`) and dtype. A read fetches 448 pages, as a layer
of 8 KV heads does for a token. The table of 16-bit pages has more than 2^31 numbers, beyond the reach of 32-bit offsets. Ways
that are kernels come last, because a fault in a kernel ends the process; the lines before it remain.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from icejax.runtime import devices
from icejax.runtime.host_reads import choose
from icejax.runtime.host_reads.backends import BACKENDS, MASKED_BACKENDS

PAGES, FETCHED, REPEATS = 4096, 448, 20
HIGH = 2**31 // (2 * 16 * 128) + 4096  # pages of 16-bit numbers with more than 2^31 numbers
TABLES = (("uint16", 16), ("uint8", 18), ("uint32", 16))  # bf16, int8 with its scales, fp32


def rows(*, high: int):
    """Yields a row per way and dtype; `high` is the number of pages in the table of 16-bit pages."""
    tables = [table(dtype, height, high=high) for dtype, height in TABLES]
    for name in sorted(
        choose.candidates(), key=choose.PROBED_BACKENDS.__contains__
    ):  # kernels last: their faults end the process
        for pinned, page_numbers, expected in tables:
            yield dict(backend=name, dtype=str(pinned.dtype), table_bytes=pinned.nbytes) | one(
                name, pinned, page_numbers, expected
            )


def table(dtype: str, height: int, *, high: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Returns a table dtype[pages, 2, height, 128] in host memory, the page numbers i32[448] to read, and their contents.

    A table of bytes has twice as many pages as one of 16-bit numbers.
    """
    pages = dict(uint16=high, uint8=2 * high).get(dtype, PAGES)
    rng = np.random.default_rng(0)
    page_numbers = np.append(rng.choice(pages - 1, FETCHED - 1, replace=False), pages - 1).astype(np.int32)
    contents = np.zeros((pages, 2, height, 128), dtype)
    contents[page_numbers] = rng.integers(0, np.iinfo(dtype).max, (FETCHED, 2, height, 128), dtype=dtype)
    return jax.block_until_ready(jax.device_put(contents, devices.host_sharding())), page_numbers, contents[page_numbers]


def one(name: str, pinned: jax.Array, asked: np.ndarray, expected: np.ndarray) -> dict:
    """Returns whether a way reads the expected bits, and its median time and rate."""
    read, pages, wanted_mask = jax.jit(BACKENDS[name]), jnp.asarray(asked), np.arange(len(asked)) % 3 > 0
    try:
        exact = np.array_equal(np.stack(read(pinned, pages), axis=1), expected)
        if name in MASKED_BACKENDS:
            masked_read = jax.jit(BACKENDS[name])(pinned, pages, jnp.asarray(wanted_mask))
            exact &= np.array_equal(np.stack(masked_read, axis=1), np.where(wanted_mask[:, None, None, None], expected, 0))
    except Exception as error:  # a missing or unfit compiler raises errors of many types
        return dict(exact=False, fault=(str(error) or type(error).__name__).splitlines()[0][:200])
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(read(pinned, pages))
        seconds.append(time.perf_counter() - started)
    median = float(np.median(seconds))
    return dict(exact=exact, microseconds=round(1e6 * median, 1), gb_per_s=round(expected.nbytes / median / 1e9, 2))


def main(argv: list[str]) -> int:
    devices.set_limits()
    for row in rows(high=PAGES if "--tiny" in argv else HIGH):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
