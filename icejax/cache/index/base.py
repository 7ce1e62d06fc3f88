"""What a retrieval policy keeps on the device of every page in the pool, to find pages by."""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.sizes import CacheSpec

Index = TypeVar("Index")  # what is kept of all pages: a pytree of arrays [B, K, P, ...], or of what its class knows
Described = TypeVar("Described")  # what `describe` makes of some pages
Update = TypeVar("Update")  # what `page_update` makes of that


class PageIndex(abc.ABC, Generic[Index, Described, Update]):
    """Makes and changes an index.

    New pages come in two steps, of which the second reads nothing: XLA copies a large array that one program reads and writes.
    """

    @abc.abstractmethod
    def empty(self, spec: CacheSpec, pages: int) -> Index:
        """Returns the index of so many pages without a token."""

    @abc.abstractmethod
    def counts(self, index: Index) -> Int[Array, "B K P"]:
        """Returns how many tokens every page holds."""

    @abc.abstractmethod
    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Described:
        """Returns what is kept of pages, of whose slots `mask` says which hold a token; `v` is None where keys hold values."""

    def flush_slice(self, index: Index, page: Int[Array, ""]) -> Index:
        """Returns an index of which `page_update` reads no more than it needs for this page alone."""
        del page
        return index

    def page_update(self, index: Index, described: Described, first: Int[Array, ""]) -> Update:
        """Returns what `apply_update` is to write for pages that begin at page `first`."""
        del index, first
        return described

    def apply_update(self, index: Index, update: Update, first: Int[Array, ""]) -> Index:
        """Returns the index with new pages from page `first` on."""
        return put_pages(index, update, first)

    def after_move(
        self, index: Index, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: int
    ) -> Index:
        """Returns the index with pages `ids`, as far as they are `there`, from page `first` on, and none from `behind` on."""
        return move_pages(index, ids, there, first, behind=behind)

    def of_prompt(self, index: Index, described: Described) -> Index:
        """Returns the index of a prompt's pages, from an empty one."""
        return self.with_pages(index, described, jnp.int32(0))

    def with_pages(self, index: Index, described: Described, first: Int[Array, ""]) -> Index:
        """Returns the index with new pages from page `first` on, in one program."""
        return self.apply_update(index, self.page_update(index, described, first), first)


def put_pages(arrays: Index, new: Index, first: Int[Array, ""]) -> Index:
    """Returns arrays [B, K, P, ...] with those of new pages from page `first` on."""
    return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, first, axis=2), arrays, new)


def move_pages(arrays: Index, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: int) -> Index:
    """Returns arrays [B, K, P, ...] after pages have moved, as `PageIndex.after_move` has it."""

    def move(x: jax.Array) -> jax.Array:
        shape = (-1, *(1,) * (x.ndim - 3))
        pages = jnp.where(there.reshape(shape), jnp.take(x, ids, axis=2), jnp.zeros((), x.dtype))
        x = jnp.where((jnp.arange(x.shape[2]) < behind).reshape(shape), x, jnp.zeros((), x.dtype))
        return jax.lax.dynamic_update_slice_in_dim(x, pages, first, axis=2)

    return jax.tree.map(move, arrays)


def slots_there(counts: Int[Array, "B K P"], page_size: int) -> Bool[Array, "B K S"]:
    """Returns which slots of all pages, one behind another, hold a token: the first of each page."""
    slots = jnp.arange(page_size)[None, None, None]
    return (slots < counts[..., None]).reshape(*counts.shape[:2], -1)


KeysAndMask = tuple[jax.Array, jax.Array]  # keys dtype[B, K, P, p, H], 0 where bool[B, K, P, p] has no token


class CodesPerToken(PageIndex[Index, KeysAndMask, Index]):
    """An index with `codes`, arrays [B, K, P, p, n], and the `count` of pages, beside what is `made` of a row's first text."""

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
        self, index: Index, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: int
    ) -> Index:
        codes, count = move_pages((index.codes, index.count), ids, there, first, behind=behind)
        return replace(index, codes=codes, count=count)
