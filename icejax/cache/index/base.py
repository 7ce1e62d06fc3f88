"""The base of page indexes: the device-side summaries of all pool pages, by which a retrieval policy selects pages or tokens.

Retrieval policies hold an index as arrays [B, K, P, ...], insert the keys [B, K, P, p, H] of new pages, and score its entries.
"""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.sizes import CacheSpec

Index = TypeVar("Index")  # summaries of all pages: a pytree of arrays [B, K, P, ...], or one that its class defines
Described = TypeVar("Described")  # what `describe` returns for new pages
PageNumber = Int[Array, ""] | int
Update = TypeVar("Update")  # what `page_update` returns for `apply_update`


class PageIndex(abc.ABC, Generic[Index, Described, Update]):
    """Builds an index and updates it.

    New pages are inserted in two steps: `page_update` reads the index, `apply_update` only writes to it. XLA copies a large
    array that one program both reads and writes.
    """

    @abc.abstractmethod
    def empty(self, spec: CacheSpec, pages: int) -> Index:
        """Returns the index of `pages` empty pages."""

    @abc.abstractmethod
    def counts(self, index: Index) -> Int[Array, "B K P"]:
        """Returns how many tokens each page holds."""

    @abc.abstractmethod
    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Described:
        """Returns the summaries of new pages.

        Args:
            k: keys of the pages; anything outside `mask`.
            v: values; None where keys hold them.
            mask: which slots hold a token.
        """

    def flush_slice(self, index: Index, page: Int[Array, ""]) -> Index:
        """Returns the part of the index that `page_update` reads to insert `page` alone; here all of it."""
        del page
        return index

    def page_update(self, index: Index, described: Described, first: Int[Array, ""]) -> Update:
        """Returns what `apply_update` writes to insert the described pages from page `first` on."""
        del index, first
        return described

    def apply_update(self, index: Index, update: Update, first: Int[Array, ""]) -> Index:
        """Returns the index with the new pages from page `first` on."""
        return put_pages(index, update, first)

    def after_move(
        self, index: Index, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: PageNumber
    ) -> Index:
        """Returns the index after M pages have moved in the pool.

        Of 8 pages, ids [5, 6], `there` [True, False], first 2 and behind 4: page 5 moves to place 2; place 3 and the pages from
        4 on become empty.

        Args:
            ids: pages to move to the places `first` to `first + M - 1`.
            there: which of `ids` hold a page; the others leave an empty one.
            behind: pages from here on become empty.
        """
        return move_pages(index, ids, there, first, behind=behind)

    def of_prompt(self, index: Index, described: Described) -> Index:
        """Returns the index of a prompt's pages; `index` is empty."""
        return self.with_pages(index, described, jnp.int32(0))

    def with_pages(self, index: Index, described: Described, first: Int[Array, ""]) -> Index:
        """Returns the index with new pages from page `first` on, in one program."""
        return self.apply_update(index, self.page_update(index, described, first), first)


def put_pages(arrays: Index, new: Index, first: Int[Array, ""]) -> Index:
    """Returns arrays [B, K, P, ...] with the `new` pages written from page `first` on."""
    return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, first, axis=2), arrays, new)


def move_pages(
    arrays: Index, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: PageNumber
) -> Index:
    """Returns arrays [B, K, P, ...] after pages have moved, as in `PageIndex.after_move`; an empty page is all 0."""

    def move(x: jax.Array) -> jax.Array:
        shape = (-1, *(1,) * (x.ndim - 3))
        pages = jnp.where(there.reshape(shape), jnp.take(x, ids, axis=2), jnp.zeros((), x.dtype))
        x = jnp.where((jnp.arange(x.shape[2]) < behind).reshape(shape), x, jnp.zeros((), x.dtype))
        return jax.lax.dynamic_update_slice_in_dim(x, pages, first, axis=2)

    return jax.tree.map(move, arrays)


def slots_there(counts: Int[Array, "B K P"], page_size: int) -> Bool[Array, "B K S"]:
    """Returns which of the S = P p slots of all pages, page after page, hold a token.

    Tokens fill the first slots of a page: `counts` [2, 1] and pages of 3 slots give [1, 1, 0, 1, 0, 0].
    """
    slots = jnp.arange(page_size)[None, None, None]
    return (slots < counts[..., None]).reshape(*counts.shape[:2], -1)


KeysAndMask = tuple[jax.Array, jax.Array]  # keys dtype[B, K, P, p, H], 0 where bool[B, K, P, p] has no token


class CodesPerToken(PageIndex[Index, KeysAndMask, Index]):
    """An index with codes per token: fields `codes`, arrays [B, K, P, p, n], and `count`, i32[B, K, P].

    Its other fields belong to a row, not to pages: for example centroids computed from the row's first text.
    """

    def counts(self, index: Index) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> KeysAndMask:
        return jnp.where(mask[..., None], k, 0), mask

    def apply_update(self, index: Index, update: Index, first: Int[Array, ""]) -> Index:
        codes, count = put_pages(*((x.codes, x.count) for x in (index, update)), first)
        return replace(update, codes=codes, count=count)

    def after_move(
        self, index: Index, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: PageNumber
    ) -> Index:
        codes, count = move_pages((index.codes, index.count), ids, there, first, behind=behind)
        return replace(index, codes=codes, count=count)
