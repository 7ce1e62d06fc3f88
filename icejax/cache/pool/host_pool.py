"""The host pool: pages of keys and values in host memory, written between programs and read inside them.

The pool is one array `uint[E, L, 64, K, planes, rows, W]` of bit patterns (`page_format.py`) in `pinned_host` memory: XLA:CPU
would rewrite a bf16 update through an fp32 copy of the whole buffer. Keys and values are two planes; keys that hold their
values are one. It is of extents of 64 pages, and a table says which of them each row of a batch has, so that a short one takes
few. A program that only reads the pool never copies it; a program that writes it takes it by donation and does nothing else
with it, because XLA:GPU copies a pool that one program both reads and writes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from icejax.cache.pool.page_format import bits_dtype, decode_pages, encode_pages
from icejax.runtime import devices
from icejax.runtime.host_reads.backends import BACKENDS, CHOOSING

EXTENT = 64  # pages
MISSING = 32  # pages that are fetched at once where others are at hand
Pool = UInt[Array, "E L 64 K planes rows W"]
Table = Int[Array, "B X"]  # the extent of every 64 pages of a row
Fetched = tuple[Float[Array, "B K M p W"], ...]  # the planes of pages, as wide as the pool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolLayer:
    """One layer's view of the pool, for reading inside a program.

    Attributes:
        singly: whether what is read are single slots, each as a page of one whose number is page * page size + slot. Not for
            pages of int8, where a slot is nothing without the scales of its page.
        plane: the only plane that is read; None: all of them.
    """

    pages: jax.Array  # uint[E, L, 64, K, planes, rows, W], pinned_host
    extents: jax.Array  # i32[B, X], of every 64 pages of a row
    ended: jax.Array | None  # bool[B], rows that need nothing any more; None: no row
    layer: int | jax.Array  # an array where one program serves all layers
    backend: str = field(metadata=dict(static=True))
    dtype: str = field(metadata=dict(static=True))
    single_slots: bool = field(default=False, metadata=dict(static=True))
    plane: int | None = field(default=None, metadata=dict(static=True))

    def fetch(self, page_ids: Int[Array, "B K M"]) -> Fetched:
        """Returns pages on the device, plane by plane."""
        table, rows = self._places(page_ids)
        return tuple(x.reshape(*page_ids.shape, *x.shape[1:]) for x in self._read(table, rows))

    def fetch_live(self, page_ids: Int[Array, "B K M"], there: Bool[Array, "B K M"]) -> tuple[Fetched, Int[Array, " B"]]:
        """Returns `fetch`, and how many pages that are `there` came from the host per row; the others fill the shape.

        Rows that have ended get zeros, and cost nothing.
        """
        wanted = there if self.ended is None else there & ~self.ended[:, None, None]
        came = wanted.sum((1, 2), dtype=jnp.int32)
        if self.backend in CHOOSING:
            return self._chosen(page_ids, wanted), came
        return self.fetch(page_ids) if self.ended is None else self._by_row(page_ids), came

    def _by_row(self, page_ids: Int[Array, "B K M"]) -> Fetched:
        """Returns `fetch`, with zeros for rows that have ended."""
        batch = len(page_ids)
        table, rows = self._places(page_ids)
        rows, live = rows.reshape(batch, -1), jnp.flatnonzero(~self.ended, size=batch, fill_value=0)

        nothing = jax.eval_shape(self.fetch, page_ids)

        def one(i: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            read = (x.reshape(nothing[0].shape[1:]) for x in self._read(table, rows[live[i]]))
            return tuple(lax.dynamic_update_index_in_dim(x, y, live[i], 0) for x, y in zip(pages, read, strict=True))

        def by_row() -> tuple[jax.Array, ...]:
            zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in nothing)
            return lax.fori_loop(0, (~self.ended).sum(), one, zeros)

        return lax.cond(self.ended.any(), by_row, lambda: self.fetch(page_ids))

    def _chosen(self, page_ids: Int[Array, "B K M"], wanted: Bool[Array, "B K M"]) -> Fetched:
        """Returns `fetch`, with zeros for pages that are not wanted, by a backend that reads no others."""
        table, rows = self._places(page_ids)
        return tuple(x.reshape(*page_ids.shape, *x.shape[1:]) for x in self._read(table, rows, wanted.reshape(-1)))

    def fetch_missing(
        self,
        page_ids: Int[Array, "B K M"],
        there: Bool[Array, "B K M"],
        held: Fetched,
        held_ids: Int[Array, "B K M"],
    ) -> tuple[Fetched, Int[Array, " B"]]:
        """Returns the pages that are `there`, taking what it can from pages `held`, and how many came from the host per row.

        The place of one that is not, and rows that have ended, get what is at hand, and cost nothing.
        """
        same = page_ids[..., :, None] == held_ids[..., None, :]
        missing = there & ~same.any(-1)
        if self.ended is not None:
            missing &= ~self.ended[:, None, None]
        came = missing.sum((1, 2), dtype=jnp.int32)
        at = same.argmax(-1)[..., None, None]
        start = [jnp.take_along_axis(x, at, axis=2, mode="promise_in_bounds") for x in held]
        if self.backend in CHOOSING:
            pages = self._chosen(page_ids, missing)
            return tuple(jnp.where(missing[..., None, None], x, y) for x, y in zip(pages, start, strict=True)), came
        table, rows = self._places(page_ids)
        pages = tuple(x.reshape(-1, *x.shape[3:]) for x in start)
        # What is missing, in front; behind it page 0 over and over, which may come once more.
        order = jnp.flatnonzero(missing, size=missing.size, fill_value=0)
        block = min(MISSING, missing.size)

        def some(i: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = lax.dynamic_slice_in_dim(order, jnp.minimum(i * block, missing.size - block), block)
            return tuple(x.at[at].set(y) for x, y in zip(pages, self._read(table, rows[at]), strict=True))

        pages = lax.fori_loop(0, (missing.sum() + block - 1) // block, some, pages)
        return tuple(x.reshape(y.shape) for x, y in zip(pages, held, strict=True)), came

    def _read(self, table: jax.Array, rows: jax.Array, *wanted: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the planes [n, p, W] of what stands at `_places`, decoded; zeros for what is not `wanted`."""
        planes, height = self.pages.shape[-3:-1]
        several = self.single_slots and self.plane is None
        if several:  # planes are pages of their own, one behind another
            rows = jnp.concatenate([rows + plane * height for plane in range(planes)])
            wanted = tuple(jnp.tile(x, planes) for x in wanted)
        planes_read = BACKENDS[self.backend](table, rows, *wanted)
        return tuple(decode_pages(x, self.dtype) for x in (jnp.split(planes_read[0], planes) if several else planes_read))

    def _places(self, page_ids: Int[Array, "B K M"]) -> tuple[jax.Array, jax.Array]:
        """Returns a table to read, and the row of every page, in its first plane where planes are apart."""
        planes, height, width = self.pages.shape[-3:]
        plane = self.plane or 0
        if self.single_slots:
            table, rows = self._table(page_ids // height)
            slots = (page_ids % height).reshape(-1) + plane * height
            return table.reshape(-1, 1, 1, width), rows * (planes * height) + slots
        table, rows = self._table(page_ids)
        return (table, rows) if self.plane is None else (table.reshape(-1, 1, height, width), rows * planes + plane)

    def run(self, first: Int[Array, ""], count: int) -> Float[Array, "{count} B K planes p W"]:
        """Returns `count` pages from `first` on, of every row and KV head, on the device."""
        ids = first + jnp.arange(count, dtype=jnp.int32)
        planes = self.fetch(jnp.broadcast_to(ids[None, None], (len(self.extents), self.pages.shape[3], count)))
        return jnp.stack(planes, axis=3).transpose(2, 0, 1, 3, 4, 5)

    def _table(self, page_ids: Int[Array, "B K M"]) -> tuple[jax.Array, jax.Array]:
        """Returns the pool as a table of pages, and the row of every page."""
        _, layers, _, heads = self.pages.shape[:4]
        extents = jnp.take_along_axis(self.extents[:, None], page_ids // EXTENT, axis=2, mode="promise_in_bounds")
        places = (extents * layers + self.layer) * EXTENT + page_ids % EXTENT
        rows = places * heads + jnp.arange(heads, dtype=jnp.int32)[None, :, None]
        return self.pages.reshape(-1, *self.pages.shape[4:]), rows.reshape(-1)


def allocate(shape: tuple[int, ...], dtype: str, *, limit: int | None = None) -> Pool:
    """Returns an empty pool of `shape` [E, L, 64, K, planes, rows, W] for keys and values of `dtype`, or pages of int8.

    Args:
        limit: bytes of host memory it may take; None: what is free.

    Raises:
        InputError: the machine has not enough free memory for it, or XLA may not pin so much.
    """
    bits, platform = bits_dtype(dtype), devices.platform()
    if platform == "gpu":
        shape = _addressable(shape, bits)
    advice = (
        "use a shorter prompt, fewer new tokens, a smaller batch (in a session a smaller context length), a 16-bit --dtype "
        "or (clustered caches, not on TPU) --cache-option page_dtype=int8"
    )
    devices.check_room("the cache needs", int(np.prod(shape)) * bits.itemsize, advice=advice, limit=limit)
    if platform == "cpu":  # an array over numpy's own memory could not be written in place later
        return jax.jit(lambda: jax.device_put(jnp.zeros(shape, bits), devices.HOST), out_shardings=devices.host_sharding())()
    return jax.device_put(np.zeros(shape, bits), devices.host_sharding())


def _addressable(shape: tuple[int, ...], bits: np.dtype) -> tuple[int, ...]:
    """Returns a shape with more extents where a kernel's offsets would overflow.

    Pallas takes 32 bits for the offsets in an array of up to 4 GiB and counts them in elements: too few for 2 GiB of bytes.
    """
    extent = math.prod(shape[1:]) * bits.itemsize
    if bits.itemsize > 1 or not 2**31 < shape[0] * extent <= 2**32:
        return shape
    return (2**32 // extent + 1, *shape[1:])


@functools.partial(jax.jit, static_argnames="together", donate_argnums=0)
def write_pages(
    pool: Pool,
    pages: Float[Array, "M l B K planes p W"],
    table: Table,
    first: Int[Array, ""] | int,
    layer: Int[Array, ""] | int = 0,
    *,
    together: int = 1,
) -> Pool:
    """Returns the pool with pages of layers from `layer` on, which of every row are those from page `first` on.

    Donates `pool`. One piece after another, each of which lies in one piece in the pool: XLA:TPU writes to a part of host
    memory in one dimension only.

    Args:
        table: the extents of the rows.
        together: pages of a piece; divides `first`, M and 64.
    """
    count, layers, batch = pages.shape[:3]
    bits = encode_pages(pages, pool.dtype)

    def one(i: jax.Array, flat: jax.Array) -> jax.Array:
        start, row = i // (layers * batch) * together, i % batch
        number, page = i // batch % layers, first + start
        place = (table[row, page // EXTENT] * pool.shape[1] + layer + number) * EXTENT + page % EXTENT
        piece = lax.dynamic_slice(bits, (start, number, row, *(0,) * (bits.ndim - 3)), (together, 1, 1, *bits.shape[3:]))
        piece = jax.device_put(piece.reshape(together, *bits.shape[3:]), devices.HOST)
        return lax.dynamic_update_slice_in_dim(flat, piece, place, axis=0)

    return lax.fori_loop(0, count // together * layers * batch, one, pool.reshape(-1, *pool.shape[3:])).reshape(pool.shape)


@functools.partial(jax.jit, donate_argnums=0)
def write_extent(pool: Pool, bits: UInt[Array, "L 64 K planes rows W"], extent: Int[Array, ""]) -> Pool:
    """Returns the pool with one extent, as it stands there; donates `pool`."""
    return lax.dynamic_update_slice_in_dim(pool, jax.device_put(bits[None], devices.HOST), extent, axis=0)


@jax.jit
def read_extent(pool: Pool, extent: Int[Array, ""]) -> UInt[Array, "L 64 K planes rows W"]:
    """Returns one extent as it stands in the pool, on the device."""
    zero = jax.device_put(jnp.int32(0), devices.HOST)
    start = (jax.device_put(extent, devices.HOST), *(zero,) * (pool.ndim - 1))
    return jax.device_put(lax.dynamic_slice(pool, start, (1, *pool.shape[1:])), devices.DEVICE)[0]
