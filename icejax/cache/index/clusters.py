"""An index of token clusters: keys [B, K, P, p, H] of similar direction, in as many clusters as there are pages.

Policy RetroInfer ranks the clusters by their mean keys and fetches the tokens of the best ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.index.base import PageIndex
from icejax.cache.sizes import CacheSpec
from icejax.ops.pages.kmeans import kmeans, nearest, sums

STRETCH = 8192  # tokens clustered together


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clusters:
    """Clusters, and the cluster of each slot of the pages; a page's tokens may belong to different clusters.

    New pages bring as many clusters, at the same indices: a token of page 7 in cluster 9 has `away` 2.

    Attributes:
        key: mean key of each cluster.
        value: mean value of each cluster; None where the keys hold the values.
        size: tokens of each cluster.
        away: cluster index minus page index, for each slot.
        count: tokens of each page, in its first slots.
    """

    key: jax.Array  # dtype[B, K, P, H]
    value: jax.Array | None  # dtype[B, K, P, Hv]
    size: jax.Array  # i32[B, K, P]
    away: jax.Array  # i32[B, K, P, p]
    count: jax.Array  # i32[B, K, P]

    @property
    def of_slots(self) -> Int[Array, "B K S"]:
        """The cluster of each slot, page after page; undefined for an empty slot."""
        pages = jnp.arange(self.away.shape[2], dtype=jnp.int32)
        return (self.away + pages[None, None, :, None]).reshape(*self.away.shape[:2], -1)


@dataclass(frozen=True)
class ClustersIndex(PageIndex[Clusters, Clusters, Clusters]):
    """Spherical k-means over the tokens inserted together, centred on their mean, with a cluster per page."""

    page_size: int
    iterations: int

    def empty(self, spec: CacheSpec, pages: int) -> Clusters:
        shape = (spec.batch_size, spec.num_kv_heads, pages)
        key, value = (jnp.zeros((*shape, size), spec.dtype) for size in (spec.head_dim, spec.value_dim))
        zeros = jnp.zeros(shape, jnp.int32)
        return Clusters(key, None if spec.latent else value, zeros, jnp.zeros((*shape, self.page_size), jnp.int32), zeros)

    def counts(self, index: Clusters) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Clusters:
        batch, heads, pages, p, size = k.shape
        together = min(pages, STRETCH // p)
        padding = [(0, 0), (0, 0), (0, -pages % together), (0, 0)]
        count = mask.sum(-1, dtype=jnp.int32)
        vectors = k if v is None else jnp.concatenate([k, v], axis=-1)
        vectors = jnp.pad(jnp.where(mask[..., None], vectors, 0).astype(jnp.float32), [*padding, (0, 0)])
        vectors, valid = (x.reshape(batch, heads, -1, together * p, *x.shape[4:]) for x in (vectors, jnp.pad(mask, padding)))
        num_filled = jnp.maximum(valid.reshape(*valid.shape[:3], together, p).any(-1).sum(-1, dtype=jnp.int32), 1)
        tokens = jnp.maximum(count.sum(-1), 1).astype(jnp.float32)[..., None, None, None]
        keys = vectors[..., :size] - vectors[..., :size].sum((2, 3), keepdims=True) / tokens
        options = dict(cosine=True, few=num_filled)
        codes = nearest(keys, kmeans(keys, valid, count=together, iterations=self.iterations - 1, **options), **options)
        total, members = sums(vectors, codes, valid, count=together)
        mean = total / jnp.maximum(members, 1)[..., None].astype(jnp.float32)
        away = codes.reshape(*codes.shape[:3], together, p) - jnp.arange(together, dtype=jnp.int32)[None, None, None, :, None]
        mean, members, away = (x.reshape(batch, heads, -1, *x.shape[4:])[:, :, :pages] for x in (mean, members, away))
        value = None if v is None else mean[..., size:].astype(v.dtype)
        return Clusters(mean[..., :size].astype(k.dtype), value, members, away, count)
