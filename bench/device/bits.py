"""Whether every way of reading host memory brings exact bits, for real pages: ``python -m bench.device.bits [--tiny]``.

One JSON line per way and dtype: 448 pages, which a layer of 8 KV heads fetches for a token. The table
of 16-bit pages has more than 2^31 numbers, which 32-bit offsets do not reach. Ways that are kernels come last: a fault in one
takes the process along, and the lines before it stay.
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
from icejax.runtime.host_reads.backends import BACKENDS, CHOOSING

PAGES, FETCHED, REPEATS = 4096, 448, 20
HIGH = 2**31 // (2 * 16 * 128) + 4096  # pages of 16-bit numbers that reach beyond 2^31
TABLES = (("uint16", 16), ("uint8", 18), ("uint32", 16))  # bf16, int8 with its scales, fp32


def rows(*, high: int):
    """Yields a line per way and dtype; `high` is how many pages the table of 16-bit pages has."""
    tables = [table(dtype, height, high=high) for dtype, height in TABLES]
    for name in sorted(choose.candidates(), key=choose.APART.__contains__):  # a fault in a kernel would take the others along
        for pinned, asked, expected in tables:
            yield dict(backend=name, dtype=str(pinned.dtype), table_bytes=pinned.nbytes) | one(name, pinned, asked, expected)


def table(dtype: str, height: int, *, high: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Returns a table in host memory, the pages to ask for, and what they hold.

    One of bytes is as large as `host.allocate` makes it at the least.
    """
    pages = dict(uint16=high, uint8=2 * high).get(dtype, PAGES)
    rng = np.random.default_rng(0)
    asked = np.append(rng.choice(pages - 1, FETCHED - 1, replace=False), pages - 1).astype(np.int32)
    whole = np.zeros((pages, 2, height, 128), dtype)
    whole[asked] = rng.integers(0, np.iinfo(dtype).max, (FETCHED, 2, height, 128), dtype=dtype)
    return jax.block_until_ready(jax.device_put(whole, devices.host_sharding())), asked, whole[asked]


def one(name: str, pinned: jax.Array, asked: np.ndarray, expected: np.ndarray) -> dict:
    """Returns whether a way brings what is expected, and how long it takes."""
    read, pages, wanted = jax.jit(BACKENDS[name]), jnp.asarray(asked), np.arange(len(asked)) % 3 > 0
    try:
        exact = np.array_equal(np.stack(read(pinned, pages), axis=1), expected)
        if name in CHOOSING:
            some = jax.jit(BACKENDS[name])(pinned, pages, jnp.asarray(wanted))
            exact &= np.array_equal(np.stack(some, axis=1), np.where(wanted[:, None, None, None], expected, 0))
    except Exception as error:  # a compiler that is not there, or not made for this, raises nearly anything
        return dict(exact=False, fault=(str(error) or type(error).__name__).splitlines()[0][:200])
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(read(pinned, pages))
        seconds.append(time.perf_counter() - started)
    median = float(np.median(seconds))
    return dict(exact=exact, microseconds=round(1e6 * median, 1), gb_per_s=round(expected.nbytes / median / 1e9, 2))


def main(argv: list[str]) -> int:
    devices.raise_pinned_limit()
    for row in rows(high=PAGES if "--tiny" in argv else HIGH):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
