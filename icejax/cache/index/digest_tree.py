"""An index of pages by a tree of digests, with the keys' scatter and a linear fit of values from keys.

Clustered policies walk the tree (`icejax.ops.pages.tree_walk`) with queries [B, K, G, H] to select pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.index.base import PageIndex, PageNumber, move_pages
from icejax.cache.sizes import CacheSpec, num_bytes
from icejax.ops.pages import tree
from icejax.ops.pages.digests import Digests, digest, empty, put
from icejax.ops.pages.key_scatter import add_scatter
from icejax.ops.pages.value_fit import FromKeys, Sums, ValueFit, empty_fit, page_sums, update_fit

Described = tuple[Digests, Sums, *tuple[Any, ...]]  # digests, sums for the fit, and a subclass's arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Digested:
    """The digest tree of all pages, with statistics of their keys and values.

    Attributes:
        levels: digests of the pages, then of each level of nodes above them, highest last.
        scatter: sum over tokens of c c^T, where c is the token's key minus the mean key of its page, f32[B, K, H, H]; a decoded
            token counts once compaction has packed its page.
        fit: the fit of values from keys; None: a token's value is estimated by its page's mean.
    """

    levels: tuple[Digests, ...]
    scatter: jax.Array
    fit: ValueFit | None


@dataclass(frozen=True)
class DigestTree(PageIndex[Digested, Described, tuple[Digests, ...]]):
    """Builds and updates a `Digested`.

    Attributes:
        dtype: dtype of the digests; None: the model's.
        value_fit: whether values are estimated from keys: directly where keys hold them, else by a fit, if its bytes are
            at most a quarter of the digests'.
    """

    dtype: str | None
    value_fit: bool

    def empty(self, spec: CacheSpec, pages: int) -> Digested:
        shape, value_size = (spec.batch_size, spec.num_kv_heads, pages), None if spec.latent else spec.value_dim
        levels = tree.build(empty(shape, spec.head_dim, value_size, self.dtype or spec.dtype))
        scatter, fit = jnp.zeros((*shape[:2], spec.head_dim, spec.head_dim)), None
        if self.value_fit and not spec.latent:
            fit = empty_fit(spec.batch_size, spec.num_kv_heads, spec.head_dim, spec.value_dim)
            is_small = 4 * num_bytes(fit) <= num_bytes(levels)
            fit = fit if is_small else None
        return Digested(levels, scatter, fit)

    def from_keys(self, index: Digested) -> FromKeys | None:
        """Returns the estimator of values from keys; None: values are estimated by means."""
        if index.fit is not None:
            return FromKeys(index.fit.matrix)
        return FromKeys(None) if self.value_fit and index.levels[0].value is None else None

    def counts(self, index: Digested) -> Int[Array, "B K P"]:
        return index.levels[0].count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Described:
        return digest(k, v, mask, self.dtype), page_sums(k, v if self.value_fit else None, mask)

    def after_move(
        self, index: Digested, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: PageNumber
    ) -> Digested:
        return replace(index, levels=tree.build(move_pages(index.levels[0], ids, there, first, behind=behind)))

    def of_prompt(self, index: Digested, described: Described) -> Digested:
        levels = tree.build(put(index.levels[0], described[0], jnp.int32(0)))
        return _fitted(replace(index, levels=levels), described[1])

    def with_pages(self, index: Digested, described: Described, first: Int[Array, ""]) -> Digested:
        return _fitted(super().with_pages(index, described, first), described[1])

    def flush_slice(self, index: Digested, page: Int[Array, ""]) -> Digested:
        return replace(index, levels=tree.families_around(index.levels, page))

    def page_update(self, index: Digested, described: Described, first: Int[Array, ""]) -> tuple[Digests, ...]:
        return tree.lineage(index.levels, described[0], first)

    def apply_update(self, index: Digested, prepared: tuple[Digests, ...], first: Int[Array, ""]) -> Digested:
        return replace(index, levels=tree.replace(index.levels, prepared, first))


def _fitted(index: Digested, sums: Sums) -> Digested:
    fit = None if index.fit is None else update_fit(index.fit, index.scatter, sums)
    return replace(index, scatter=add_scatter(index.scatter, sums.keys.sum(2)), fit=fit)
