"""The host pool: every backend fetches exact bits, writes are in place, and a pool too large for memory is refused."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from icejax.cache.pool import allocation, host_pool, page_format
from icejax.checks.errors import InputError
from icejax.runtime import devices
from icejax.runtime.host_reads import choose
from icejax.runtime.host_reads.backends import BACKENDS

SHAPE = (6, 3, host_pool.EXTENT, 4, 2, 8, 16)  # E, L, 64, K, 2, p, H
TABLE = jnp.asarray([[4, 1], [2, 5]], jnp.int32)  # extents of two rows, 128 pages each
ROWS, PAGES = 2, 128
BACKENDS_OF_CPUS = [*choose.ORDER["cpu"], "gather"]
# Whole pages of one dtype are read with every backend, all else with the one in use; in the slow suite all with every one.
IN_USE, REST = BACKENDS_OF_CPUS[0], [pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS_OF_CPUS[1:]]
OTHERS = ((2, "float32"), (2, "float16"), (1, "bfloat16"))


def bits(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns random bit patterns; some are NaN with payloads."""
    kind = page_format.bits_dtype(dtype)
    return np.random.default_rng(0).integers(0, np.iinfo(kind).max, shape, dtype=kind)


@pytest.mark.parametrize(
    "backend, planes, dtype",
    [
        *((name, 2, "bfloat16") for name in BACKENDS_OF_CPUS),
        *((IN_USE, *case) for case in OTHERS),
        *(pytest.param(name, *case, marks=pytest.mark.slow) for case in OTHERS for name in BACKENDS_OF_CPUS[1:]),
    ],
)
def test_fetch_brings_exact_bits(backend, planes, dtype):
    stored = bits((*SHAPE[:4], planes, *SHAPE[5:]), dtype)
    pool = jax.device_put(stored, devices.host_sharding())
    ids = np.random.default_rng(1).integers(0, PAGES, (ROWS, SHAPE[3], 5)).astype(np.int32)

    @jax.jit
    def read(pool, ids):
        pages = host_pool.PoolLayer(pool, TABLE, None, 1, backend, dtype).fetch(ids)
        return [jax.lax.bitcast_convert_type(x, stored.dtype) for x in pages]

    pages = np.stack(read(pool, jnp.asarray(ids)), axis=3)
    for index in np.ndindex(ids.shape):
        location = TABLE[index[0], ids[index] // host_pool.EXTENT], 1, ids[index] % host_pool.EXTENT, index[1]
        np.testing.assert_array_equal(pages[index], stored[location])


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("backend", [IN_USE, *REST])
def test_single_slots_are_fetched_and_nothing_beside_them(backend, planes, monkeypatch):
    stored, reads = bits((*SHAPE[:4], planes, *SHAPE[5:]), "bfloat16"), []

    def recording_read(*arrays):
        reads.append(read(*arrays))
        return reads[-1]

    read = BACKENDS[backend]
    monkeypatch.setitem(BACKENDS, backend, recording_read)
    pool = jax.device_put(stored, devices.host_sharding())
    ids = np.random.default_rng(1).integers(0, PAGES * SHAPE[5], (ROWS, SHAPE[3], 9)).astype(np.int32)

    @jax.jit
    def slots(pool, ids):
        values = host_pool.PoolLayer(pool, TABLE, None, 1, backend, "bfloat16", single_slots=True).fetch(ids)
        return [jax.lax.bitcast_convert_type(x, stored.dtype) for x in values]

    fetched = np.stack(slots(pool, jnp.asarray(ids)), axis=3)
    for index in np.ndindex(ids.shape):
        page, slot = divmod(ids[index], SHAPE[5])
        np.testing.assert_array_equal(
            fetched[index][:, 0],
            stored[TABLE[index[0], page // host_pool.EXTENT], 1, page % host_pool.EXTENT, index[1], :, slot],
        )
    assert [x.size for arrays in reads for x in arrays] == [planes * ids.size * SHAPE[6]]


@pytest.mark.parametrize("singly", [False, True])
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("backend", [IN_USE, *REST])
def test_one_plane_is_fetched_and_nothing_of_the_other(backend, plane, singly, monkeypatch):
    stored, reads = bits(SHAPE, "bfloat16"), []

    def recording_read(*arrays):
        reads.append(read(*arrays))
        return reads[-1]

    read = BACKENDS[backend]
    monkeypatch.setitem(BACKENDS, backend, recording_read)
    ids = np.random.default_rng(1).integers(0, PAGES * (SHAPE[5] if singly else 1), (ROWS, SHAPE[3], 9)).astype(np.int32)

    @jax.jit
    def fetch(pool, ids):
        (values,) = host_pool.PoolLayer(pool, TABLE, None, 1, backend, "bfloat16", singly, plane).fetch(ids)
        return jax.lax.bitcast_convert_type(values, stored.dtype)

    fetched = np.asarray(fetch(jax.device_put(stored, devices.host_sharding()), jnp.asarray(ids)))
    for index in np.ndindex(ids.shape):
        page, slot = divmod(ids[index], SHAPE[5]) if singly else (ids[index], slice(None))
        location = TABLE[index[0], page // host_pool.EXTENT], 1, page % host_pool.EXTENT, index[1], plane, slot
        np.testing.assert_array_equal(fetched[index][0] if singly else fetched[index], stored[location])
    assert [x.size for arrays in reads for x in arrays] == [fetched.size]


def test_missing_pages_are_fetched_and_the_held_ones_reused():
    pool = jax.device_put(bits(SHAPE, "float32"), devices.host_sharding())
    rng = np.random.default_rng(1)
    batch, heads = ROWS, SHAPE[3]
    before, after = (rng.integers(60, 68, (batch, heads, 7)).astype(np.int32) for _ in range(2))  # page ids in two extents
    ended = np.arange(batch) == batch - 1

    @jax.jit
    def read(pool, before, after, ended):
        layer = host_pool.PoolLayer(pool, TABLE, ended, 1, choose.ORDER["cpu"][0], "float32")
        pages, missing = layer.fetch_missing(after, after >= 0, layer.fetch(before), before)
        return jnp.stack(layer.fetch(after)), jnp.stack(pages), missing

    expected, pages, missing = map(np.asarray, read(pool, before, after, ended))
    num_missing = [[len([p for p in after[b, k] if p not in before[b, k]]) for k in range(heads)] for b in range(batch)]
    np.testing.assert_array_equal(missing, np.where(ended, 0, np.sum(num_missing, axis=1)))
    assert 0 < missing[0] < 7 * heads
    np.testing.assert_array_equal(pages[:, ~ended].view(np.uint32), expected[:, ~ended].view(np.uint32))


@pytest.mark.parametrize("ended", [[False, False], [False, True], [True, False], [True, True]], ids=str)
@pytest.mark.parametrize("singly", [False, True])
def test_rows_that_have_ended_fetch_nothing(ended, singly):
    pool = jax.device_put(bits(SHAPE, "float32"), devices.host_sharding())
    ids = np.random.default_rng(1).integers(0, PAGES, (ROWS, SHAPE[3], 5)).astype(np.int32)

    @jax.jit
    def read(pool, ids, ended):
        layer = host_pool.PoolLayer(pool, TABLE, ended, 1, choose.ORDER["cpu"][0], "float32", singly)
        pages, count = layer.fetch_live(ids, ids >= 0)
        return jnp.stack(pages), jnp.stack(layer.fetch(ids)), count

    pages, expected, count = map(np.asarray, read(pool, ids, np.asarray(ended)))
    live = ~np.asarray(ended)
    np.testing.assert_array_equal(pages[:, live].view(np.uint32), expected[:, live].view(np.uint32))
    assert not pages[:, ~live].any()
    np.testing.assert_array_equal(count, np.where(live, 5 * SHAPE[3], 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_land_in_place_and_nowhere_else(dtype):
    pool = allocation.allocate(SHAPE, dtype)
    assert pool.sharding.memory_kind == "pinned_host"
    address = pool.unsafe_buffer_pointer()
    layer, run_pages = bits((96, 1, ROWS, *SHAPE[3:]), dtype), bits((3, SHAPE[1], ROWS, *SHAPE[3:]), dtype)
    extent, expected = bits(SHAPE[1:], dtype), np.zeros(SHAPE, layer.dtype)
    for row, page in np.ndindex(ROWS, 96):
        expected[TABLE[row, page // host_pool.EXTENT], 2, page % host_pool.EXTENT] = layer[page, 0, row]
    for row, page in np.ndindex(ROWS, 3):  # across the end of an extent
        expected[TABLE[row, (62 + page) // host_pool.EXTENT], :, (62 + page) % host_pool.EXTENT] = run_pages[page, :, row]
    expected[3] = extent
    as_values = lambda x: jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.dtype(dtype))  # noqa: E731
    pool = host_pool.write_pages(pool, as_values(layer), TABLE, 0, 2, together=32)
    pool = host_pool.write_pages(pool, as_values(run_pages), TABLE, jnp.int32(62))
    pool = host_pool.write_extent(pool, extent, jnp.int32(3))
    assert pool.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(pool), expected)
    np.testing.assert_array_equal(np.asarray(host_pool.read_extent(pool, jnp.int32(3))), extent)
    run = jax.jit(lambda pool: host_pool.PoolLayer(pool, TABLE, None, 1, choose.ORDER["cpu"][0], dtype).run(jnp.int32(62), 3))(
        pool
    )
    np.testing.assert_array_equal(np.asarray(run, np.float32), np.asarray(as_values(run_pages[:, 1]), np.float32))


@pytest.mark.parametrize("backend", [IN_USE, *REST])
def test_codes_go_where_their_pages_go(backend):
    """Into extents, out of them, and by page to the device; pages keep their bits beside them."""
    rng, pool = np.random.default_rng(0), allocation.allocate(SHAPE, "bfloat16", 24)
    assert page_format.pool_bytes(pool) == np.prod(SHAPE) * 2 + np.prod(SHAPE[:4]) * 24
    pages = jnp.asarray(rng.standard_normal((96, 1, ROWS, *SHAPE[3:])), jnp.bfloat16)
    codes = rng.integers(0, 256, (96, 1, ROWS, SHAPE[3], 1, 1, 24)).astype(np.uint8)
    pool = host_pool.write_pages(pool, page_format.PagesWithCodes(pages, jnp.asarray(codes)), TABLE, 0, 2, together=32)
    pool = host_pool.write_extent(pool, host_pool.read_extent(pool, jnp.int32(4)), jnp.int32(3))
    ids, ended = rng.integers(0, 96, (ROWS, SHAPE[3], 5)).astype(np.int32), jnp.asarray([False, True])

    @jax.jit
    def read(pool, ids):
        layer = host_pool.PoolLayer(pool, jnp.asarray([[3, 1], [2, 5]], jnp.int32), ended, 2, backend, "bfloat16", True)
        (fetched,), count = layer.codes.fetch_live(ids, ids >= 0)
        return fetched, count, layer.run(jnp.int32(62), 3)

    fetched, count, run = jax.tree.map(np.asarray, read(pool, ids))
    heads = np.arange(SHAPE[3])[:, None]
    np.testing.assert_array_equal(fetched[0], codes[ids[0], 0, 0, heads, 0])
    assert not fetched[1].any() and count.tolist() == [ids[0].size, 0]
    np.testing.assert_array_equal(run.codes, codes[62:65, 0])


def test_a_wrong_or_failing_backend_is_passed_over_and_told(monkeypatch, caplog):
    def refuse(table, rows):
        raise NotImplementedError("not here")

    def wrong(table, rows):
        return tuple(x + jnp.ones((), x.dtype) for x in BACKENDS["gather"](table, rows))

    monkeypatch.setitem(BACKENDS, "refusing", refuse)
    monkeypatch.setitem(BACKENDS, "wrong", wrong)
    monkeypatch.setattr(choose, "ORDER", {"cpu": ("refusing", "wrong", "slices")})
    with caplog.at_level("INFO"):
        assert choose.fetch_backend.__wrapped__() == "slices"
    assert [r.message for r in caplog.records if "backend" in r.message] == [
        "fetch backend refusing on cpu fails: not here",
        "fetch backend wrong on cpu brings wrong bits",
        "fetch backend on cpu: slices",
    ]
    monkeypatch.setenv(choose.CHOICE, "wrong")
    with pytest.raises(InputError, match="ICEJAX_FETCH_BACKEND=wrong does not work on cpu: unset it, or use --cache full"):
        choose.fetch_backend.__wrapped__()
    monkeypatch.setenv(choose.CHOICE, "none")
    with pytest.raises(InputError, match="ICEJAX_FETCH_BACKEND must be one of refusing, wrong, slices on cpu, got 'none'"):
        choose.fetch_backend.__wrapped__()


def test_too_large_a_pool_is_refused_with_need_and_supply(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 3 * 2**30})())
    with pytest.raises(InputError, match=r"needs 4\.0 GiB of host memory and 3\.0 GiB is free: use a shorter prompt"):
        allocation.allocate((2**15, 1, 1, 8, 2, 16, 128), "float32")
    with pytest.raises(InputError, match=r"needs 4\.0 GiB of host memory and the limit is 2\.5 GiB: use a shorter prompt"):
        allocation.allocate((2**15, 1, 1, 8, 2, 16, 128), "float32", limit=5 * 2**29)


def test_pinned_limit_is_three_quarters_of_memory_unless_set(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 200 * 2**30, "available": 2**40})())
    monkeypatch.setenv(devices.PINNED_LIMIT, "3")
    monkeypatch.delenv(devices.PINNED_LIMIT)
    devices.set_limits()
    assert devices.PINNED_LIMIT not in os.environ  # too late: JAX has started
    monkeypatch.setattr(devices, "started", lambda: False)
    devices.set_limits()
    assert os.environ[devices.PINNED_LIMIT] == "150"
    monkeypatch.setenv(devices.PINNED_LIMIT, "3")
    devices.set_limits()
    held = jax.device_put(np.zeros(2**28, np.uint8), devices.host_sharding())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for arrays, pinned in (([], ""), ([held], r" with 0\.2 GiB already pinned")):
        monkeypatch.setattr(jax, "live_arrays", lambda arrays=arrays: arrays)
        message = (
            rf"needs 4\.0 GiB of pinned memory{pinned}, but XLA may pin at most 3 GiB: set {devices.PINNED_LIMIT}=12 before"
        )
        with pytest.raises(InputError, match=message):
            allocation.allocate((2**15, 1, 1, 8, 2, 16, 128), "float32")
    monkeypatch.setenv(devices.PINNED_LIMIT, "much")
    with pytest.raises(InputError, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB must be a whole number of GiB, got 'much'"):
        allocation.allocate((2**15, 1, 1, 8, 2, 16, 128), "float32")


@pytest.mark.parametrize(("flags", "threads"), [("--xla_force_host_platform_device_count=8", "32"), ("", None)])
def test_several_cpu_devices_have_threads_to_spare(monkeypatch, flags, threads):
    monkeypatch.setattr(devices, "started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", flags)
    for name in (devices.CPU_THREADS, devices.PINNED_LIMIT):
        monkeypatch.setenv(name, "1")  # so that it is restored
        monkeypatch.delenv(name)
    devices.set_limits()
    assert os.environ.get(devices.CPU_THREADS) == threads
    monkeypatch.setenv(devices.CPU_THREADS, "9")
    devices.set_limits()
    assert os.environ[devices.CPU_THREADS] == "9"


@pytest.mark.parametrize(
    ("dtype", "pages", "expected"),
    [("uint8", 100, 100), ("uint8", 600_000, 2**32 // 4608 + 1), ("uint8", 2**20, 2**20), ("uint16", 300_000, 300_000)],
)
def test_byte_pool_has_no_size_a_kernel_cannot_address(dtype, pages, expected):
    """Byte offsets between 2 and 4 GiB would not fit the 32 bits that Pallas uses for them."""
    shape = (pages, 1, 1, 1, 2, 18, 128)
    assert allocation._addressable(shape, np.dtype(dtype)) == (expected, *shape[1:])
