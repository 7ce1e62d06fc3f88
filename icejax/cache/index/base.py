"""What a retrieval policy keeps on the device of every page in the pool, to find pages by."""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.sizes import CacheSpec


class PageIndex(abc.ABC):
    """Makes and changes an index: a pytree of arrays [B, K, P, ...] over pages, or of what the methods here know.

    New pages come in two steps, of which the second reads nothing: XLA copies a large array that one program reads and writes.
    """

    @abc.abstractmethod
    def empty(self, spec: CacheSpec, pages: int) -> Any:
        """Returns the index of so many pages without a token."""

    @abc.abstractmethod
    def counts(self, index: Any) -> Int[Array, "B K P"]:
        """Returns how many tokens every page holds."""

    @abc.abstractmethod
    def describe(self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]) -> Any:
        """Returns what is kept of pages, of whose slots `mask` says which hold a token; `v` is None where keys hold values."""

    def around(self, index: Any, page: Int[Array, ""]) -> Any:
        """Returns an index of which `prepared` reads no more than it needs for this page alone."""
        del page
        return index

    def prepared(self, index: Any, described: Any, first: Int[Array, ""]) -> Any:
        """Returns what `put` is to write for pages that begin at page `first`."""
        del index, first
        return described

    def put(self, index: Any, prepared: Any, first: Int[Array, ""]) -> Any:
        """Returns the index with new pages from page `first` on."""
        return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, first, axis=2), index, prepared)

    def moved(self, index: Any, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: int) -> Any:
        """Returns the index with pages `ids`, as far as they are `there`, from page `first` on, and none from `behind` on."""

        def move(x: jax.Array) -> jax.Array:
            shape = (-1, *(1,) * (x.ndim - 3))
            pages = jnp.where(there.reshape(shape), jnp.take(x, ids, axis=2), jnp.zeros((), x.dtype))
            x = jnp.where((jnp.arange(x.shape[2]) < behind).reshape(shape), x, jnp.zeros((), x.dtype))
            return jax.lax.dynamic_update_slice_in_dim(x, pages, first, axis=2)

        return jax.tree.map(move, index)

    def of_prompt(self, index: Any, described: Any) -> Any:
        """Returns the index of a prompt's pages, from an empty one."""
        return self.with_pages(index, described, jnp.int32(0))

    def with_pages(self, index: Any, described: Any, first: Int[Array, ""]) -> Any:
        """Returns the index with new pages from page `first` on, in one program."""
        return self.put(index, self.prepared(index, described, first), first)


def slots_there(counts: Int[Array, "B K P"], page_size: int) -> Bool[Array, "B K S"]:
    """Returns which slots of all pages, one behind another, hold a token: the first of each page."""
    slots = jnp.arange(page_size)[None, None, None]
    return (slots < counts[..., None]).reshape(*counts.shape[:2], -1)


class CodesPerToken(PageIndex):
    """An index with `codes`, arrays [B, K, P, p, n], and the `count` of pages, beside what is `made` of a row's first text."""

    def counts(self, index: Any) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> tuple[Float[Array, "B K P p H"], Bool[Array, "B K P p"]]:
        return jnp.where(mask[..., None], k, 0), mask

    def put(self, index: Any, prepared: Any, first: Int[Array, ""]) -> Any:
        codes, count = super().put(*((x.codes, x.count) for x in (index, prepared)), first)
        return replace(prepared, codes=codes, count=count)

    def moved(self, index: Any, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: int) -> Any:
        codes, count = super().moved((index.codes, index.count), ids, there, first, behind=behind)
        return replace(index, codes=codes, count=count)
