"""The host pool: pages of keys and values in host memory, written between programs and read inside them.

Retrieval policies fetch pages [B, K, M] from a `PoolLayer`; the engine writes pages after prefill, flush and compact. The pool
is one array `uint[E, L, 64, K, planes, rows, W]` of bit patterns (`page_format.py`) in `pinned_host` memory: XLA:CPU would
rewrite a bf16 update through an fp32 copy of the whole buffer. Keys and values are two planes; keys that hold their values are
one. A policy that keeps codes of its pages has a second array for them (`PagesWithCodes`), and one that keeps all on the device
has no array, but (). The pool consists of extents of 64 pages; a table names the extents of each row, so that a short row takes
few. With the table row [5, 2] page 70 is page 6 of extent 2.

A program that only reads the pool never copies it. A program that writes the pool takes it by donation and does nothing else
with it, because XLA:GPU copies a pool that one program both reads and writes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from icejax.cache.pool.page_format import (
    BYTES,
    NoPages,
    PagesWithCodes,
    decode_pages,
    encode_pages,
    without_codes,
)
from icejax.runtime import devices
from icejax.runtime.host_reads.backends import BACKENDS, MASKED_BACKENDS
from icejax.runtime.mesh import WHOLE, Mesh, cut, on_mesh

EXTENT = 64  # pages
MISSING = 32  # pages read at a time by `fetch_missing`
BY_HEAD = cut(3)  # of the pool [E, L, 64, K, ...], and of new pages [M, l, B, K, ...]
OF_EXTENT = cut(2)  # of one extent of the pool [L, 64, K, ...]
Pool = UInt[Array, "E L 64 K planes rows W"] | PagesWithCodes | NoPages
Extent = UInt[Array, "L 64 K planes rows W"] | PagesWithCodes | NoPages
NewPages = Float[Array, "M l B K planes p W"] | PagesWithCodes | NoPages
Table = Int[Array, "B X"]  # extent of each 64 pages of a row
Values = Float[Array, "B K M p W"] | UInt[Array, "B K M p W"]
Fetched = tuple[Values, ...]  # the planes of pages, padded to the width of the pool; codes are bytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PoolLayer:
    """One layer's view of the pool, for reading inside a program.

    Attributes:
        single_slots: whether to read single slots, each a page of one slot with the id page * page size + slot. Not for int8
            pages, whose slots cannot be decoded without the scales of the page.
        plane: the only plane to read; None: all planes.
    """

    pool: jax.Array | PagesWithCodes | NoPages  # uint[E, L, 64, K, planes, rows, W], pinned_host
    extents: jax.Array  # i32[B, X], extent of each 64 pages of a row
    ended: jax.Array | None  # bool[B], rows that have ended; None: every row is read
    layer: int | jax.Array  # a traced index where one program serves all layers
    backend: str = field(metadata=dict(static=True))
    dtype: str = field(metadata=dict(static=True))
    single_slots: bool = field(default=False, metadata=dict(static=True))
    plane: int | None = field(default=None, metadata=dict(static=True))

    @property
    def cuts(self) -> PoolLayer:
        """How the arrays are cut for a mesh."""
        return replace(self, pool=BY_HEAD, extents=WHOLE, ended=WHOLE, layer=WHOLE)

    @property
    def pages(self) -> jax.Array:
        """The pages of all layers, without their codes."""
        return without_codes(self.pool)

    @property
    def codes(self) -> PoolLayer:
        """The codes of the layer's pages, as pages of one plane and one slot that are bytes."""
        return replace(self, pool=self.pool.codes, dtype=BYTES, single_slots=False, plane=None)

    def fetch(self, page_ids: Int[Array, "B K M"]) -> Fetched:
        """Returns the pages `page_ids` on the device, plane by plane."""
        table, rows = self._page_table(page_ids)
        return tuple(x.reshape(*page_ids.shape, *x.shape[1:]) for x in self._read(table, rows))

    def fetch_live(self, page_ids: Int[Array, "B K M"], there: Bool[Array, "B K M"]) -> tuple[Fetched, Int[Array, " B"]]:
        """Returns `fetch`, and how many of the pages in `there` came from the host per row.

        Rows that have ended get zeros and read nothing.

        Args:
            there: which of `page_ids` are pages; the other ids fill the shape and may return anything.
        """
        wanted = there if self.ended is None else there & ~self.ended[:, None, None]
        num_fetched = wanted.sum((1, 2), dtype=jnp.int32)
        if self.backend in MASKED_BACKENDS:
            return self._fetch_wanted(page_ids, wanted), num_fetched
        return self.fetch(page_ids) if self.ended is None else self._fetch_live_rows(page_ids), num_fetched

    def _fetch_live_rows(self, page_ids: Int[Array, "B K M"]) -> Fetched:
        """Returns `fetch`, with zeros for rows that have ended."""
        batch = len(page_ids)
        table, rows = self._page_table(page_ids)
        rows, live = rows.reshape(batch, -1), jnp.flatnonzero(~self.ended, size=batch, fill_value=0)
        shapes = jax.eval_shape(self.fetch, page_ids)

        def fetch_row(i: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            planes = (x.reshape(shapes[0].shape[1:]) for x in self._read(table, rows[live[i]]))
            return tuple(lax.dynamic_update_index_in_dim(x, y, live[i], 0) for x, y in zip(pages, planes, strict=True))

        def fetch_rows() -> tuple[jax.Array, ...]:
            return lax.fori_loop(0, (~self.ended).sum(), fetch_row, tuple(jnp.zeros(x.shape, x.dtype) for x in shapes))

        return lax.cond(self.ended.any(), fetch_rows, lambda: self.fetch(page_ids))

    def _fetch_wanted(self, page_ids: Int[Array, "B K M"], wanted: Bool[Array, "B K M"]) -> Fetched:
        """Returns `fetch`, with zeros for pages outside `wanted`, by a backend that reads only the wanted pages."""
        table, rows = self._page_table(page_ids)
        return tuple(x.reshape(*page_ids.shape, *x.shape[1:]) for x in self._read(table, rows, wanted.reshape(-1)))

    def fetch_missing(
        self,
        page_ids: Int[Array, "B K M"],
        there: Bool[Array, "B K M"],
        held: Fetched,
        held_ids: Int[Array, "B K M"],
    ) -> tuple[Fetched, Int[Array, " B"]]:
        """Returns `fetch`, reading only pages that the device does not hold, and how many came from the host per row.

        Ids outside `there` and rows that have ended read nothing and may return anything.

        Args:
            there: which of `page_ids` are pages.
            held: planes of the pages on the device.
            held_ids: ids of the pages in `held`.
        """
        same = page_ids[..., :, None] == held_ids[..., None, :]
        missing = there & ~same.any(-1)
        if self.ended is not None:
            missing &= ~self.ended[:, None, None]
        num_fetched = missing.sum((1, 2), dtype=jnp.int32)
        held_at = same.argmax(-1)[..., None, None]
        reused = [jnp.take_along_axis(x, held_at, axis=2, mode="promise_in_bounds") for x in held]
        if self.backend in MASKED_BACKENDS:
            pages = self._fetch_wanted(page_ids, missing)
            return tuple(jnp.where(missing[..., None, None], x, y) for x, y in zip(pages, reused, strict=True)), num_fetched
        table, rows = self._page_table(page_ids)
        pages = tuple(x.reshape(-1, *x.shape[3:]) for x in reused)
        # Missing pages come first; the rest is index 0 repeated, whose page may be read again.
        order = jnp.flatnonzero(missing, size=missing.size, fill_value=0)
        block = min(MISSING, missing.size)

        def read_block(i: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            indices = lax.dynamic_slice_in_dim(order, jnp.minimum(i * block, missing.size - block), block)
            return tuple(x.at[indices].set(y) for x, y in zip(pages, self._read(table, rows[indices]), strict=True))

        pages = lax.fori_loop(0, (missing.sum() + block - 1) // block, read_block, pages)
        return tuple(x.reshape(y.shape) for x, y in zip(pages, held, strict=True)), num_fetched

    def _read(self, table: jax.Array, rows: jax.Array, *wanted: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the planes [n, p, W] of the rows of a `_page_table`, decoded; zeros for rows outside `wanted`."""
        planes, height = self.pages.shape[-3:-1]
        stacked = self.single_slots and self.plane is None
        if stacked:  # each plane of a slot is a row of its own: all keys are read, then all values
            rows = jnp.concatenate([rows + plane * height for plane in range(planes)])
            wanted = tuple(jnp.tile(x, planes) for x in wanted)
        planes_read = BACKENDS[self.backend](table, rows, *wanted)
        return tuple(decode_pages(x, self.dtype) for x in (jnp.split(planes_read[0], planes) if stacked else planes_read))

    def _page_table(self, page_ids: Int[Array, "B K M"]) -> tuple[jax.Array, jax.Array]:
        """Returns the pool as a table of pages, planes or slots, as this view reads them, and the table row of every id."""
        planes, height, width = self.pages.shape[-3:]
        plane = self.plane or 0
        if self.single_slots:
            table, rows = self._table(page_ids // height)
            slots = (page_ids % height).reshape(-1) + plane * height
            return table.reshape(-1, 1, 1, width), rows * (planes * height) + slots
        table, rows = self._table(page_ids)
        return (table, rows) if self.plane is None else (table.reshape(-1, 1, height, width), rows * planes + plane)

    def run(self, first: Int[Array, ""], count: int) -> jax.Array | PagesWithCodes | NoPages:
        """Returns the `count` pages [count, B, K, planes, p, W] from page `first` on, with their codes, on the device."""
        if isinstance(self.pages, tuple):
            return ()
        if isinstance(self.pool, PagesWithCodes):
            return PagesWithCodes(replace(self, pool=self.pages).run(first, count), self.codes.run(first, count))
        ids = first + jnp.arange(count, dtype=jnp.int32)
        planes = self.fetch(jnp.broadcast_to(ids[None, None], (len(self.extents), self.pages.shape[3], count)))
        return jnp.stack(planes, axis=3).transpose(2, 0, 1, 3, 4, 5)

    def _table(self, page_ids: Int[Array, "B K M"]) -> tuple[jax.Array, jax.Array]:
        """Returns the pool as a table of whole pages, and the table row of every page.

        In a pool of 3 layers and 2 KV heads, page 70 of head 1 in layer 2, whose extent is 4, is page (4 * 3 + 2) * 64 + 6 =
        902 of the pool and row 902 * 2 + 1 = 1,805 of the table.
        """
        _, layers, _, heads = self.pages.shape[:4]
        extents = jnp.take_along_axis(self.extents[:, None], page_ids // EXTENT, axis=2, mode="promise_in_bounds")
        pages = (extents * layers + self.layer) * EXTENT + page_ids % EXTENT
        rows = pages * heads + jnp.arange(heads, dtype=jnp.int32)[None, :, None]
        return self.pages.reshape(-1, *self.pages.shape[4:]), rows.reshape(-1)


@functools.partial(jax.jit, static_argnames=("together", "mesh"), donate_argnums=0)
def write_pages(
    pool: Pool,
    pages: NewPages,
    table: Table,
    first: Int[Array, ""] | int,
    layer: Int[Array, ""] | int = 0,
    *,
    together: int = 1,
    mesh: Mesh | None = None,
) -> Pool:
    """Returns the pool with M new pages of every row, and their codes, from page `first` on, for the l layers from `layer` on.

    Donates `pool`. Writes contiguous pieces one after another: XLA:TPU writes to a part of host memory in one dimension only.

    Args:
        table: the extents of each row.
        together: pages of a piece; divides `first`, M and 64.
        mesh: the devices that each have the pages of their KV heads; None: one device.
    """

    def written(pool: jax.Array, pages: jax.Array, table: Table, first: jax.Array | int, layer: jax.Array | int) -> jax.Array:
        count, layers, batch = pages.shape[:3]
        bits = encode_pages(pages, pool.dtype)

        def write(i: jax.Array, flat: jax.Array) -> jax.Array:
            start, row = i // (layers * batch) * together, i % batch
            number, page = i // batch % layers, first + start
            place = (table[row, page // EXTENT] * pool.shape[1] + layer + number) * EXTENT + page % EXTENT
            piece = lax.dynamic_slice(bits, (start, number, row, *(0,) * (bits.ndim - 3)), (together, 1, 1, *bits.shape[3:]))
            piece = jax.device_put(piece.reshape(together, *bits.shape[3:]), devices.HOST)
            return lax.dynamic_update_slice_in_dim(flat, piece, place, axis=0)

        flat = pool.reshape(-1, *pool.shape[3:])
        return lax.fori_loop(0, count // together * layers * batch, write, flat).reshape(pool.shape)

    def all_written(pool: Pool, pages: NewPages, *places: jax.Array | int) -> Pool:
        return jax.tree.map(lambda x, y: written(x, y, *places), pool, pages)

    return on_mesh(mesh, all_written, (pool, pages, table, first, layer), (BY_HEAD, BY_HEAD, WHOLE, WHOLE, WHOLE), BY_HEAD)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def write_extent(pool: Pool, bits: Extent, extent: Int[Array, ""], *, mesh: Mesh | None = None) -> Pool:
    """Returns the pool with the bit patterns `bits` in one extent; donates `pool`. `mesh` is that of `write_pages`."""

    def written(pool: jax.Array, bits: jax.Array, extent: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(pool, jax.device_put(bits[None], devices.HOST), extent, axis=0)

    def all_written(pool: Pool, bits: Extent, extent: jax.Array) -> Pool:
        return jax.tree.map(lambda x, y: written(x, y, extent), pool, bits)

    return on_mesh(mesh, all_written, (pool, bits, extent), (BY_HEAD, OF_EXTENT, WHOLE), BY_HEAD)


@functools.partial(jax.jit, static_argnames="mesh")
def read_extent(pool: Pool, extent: Int[Array, ""], *, mesh: Mesh | None = None) -> Extent:
    """Returns the bit patterns of one extent, on the devices. `mesh` is that of `write_pages`."""

    def read(pool: jax.Array, extent: jax.Array) -> jax.Array:
        zero = jax.device_put(jnp.int32(0), devices.HOST)
        start = (jax.device_put(extent, devices.HOST), *(zero,) * (pool.ndim - 1))
        return jax.device_put(lax.dynamic_slice(pool, start, (1, *pool.shape[1:])), devices.DEVICE)[0]

    def all_read(pool: Pool, extent: jax.Array) -> Extent:
        return jax.tree.map(lambda x: read(x, extent), pool)

    return on_mesh(mesh, all_read, (pool, extent), (BY_HEAD, WHOLE), OF_EXTENT)
