"""An index of clusters of tokens of a like direction, as many as there are pages."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.index.base import PageIndex
from icejax.cache.sizes import CacheSpec
from icejax.ops.pages.kmeans import kmeans, nearest, sums

STRETCH = 8192  # tokens that are clustered together


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clusters:
    """Clusters, each in the place of a page that came with its tokens, and pages, whose tokens may be in any of them.

    Attributes:
        key: mean key of each cluster.
        value: mean value; None where values are channels of the keys, so that their means are too.
        size: tokens of each cluster.
        away: of the slots of every page, how many places behind the page their cluster is.
        count: tokens of every page, in its first slots.
    """

    key: jax.Array  # dtype[B, K, P, H]
    value: jax.Array | None  # dtype[B, K, P, Hv]
    size: jax.Array  # i32[B, K, P]
    away: jax.Array  # i32[B, K, P, p]
    count: jax.Array  # i32[B, K, P]

    @property
    def of_slots(self) -> Int[Array, "B K S"]:
        """The cluster of the slots of all pages, one behind another; any for an empty one."""
        pages = jnp.arange(self.away.shape[2], dtype=jnp.int32)
        return (self.away + pages[None, None, :, None]).reshape(*self.away.shape[:2], -1)


@dataclass(frozen=True)
class ClustersIndex(PageIndex[Clusters, Clusters, Clusters]):
    """k-means by angle over the tokens that come together, less their mean, in stretches; as many clusters as pages come."""

    page_size: int
    iterations: int

    def empty(self, spec: CacheSpec, pages: int) -> Clusters:
        shape = (spec.batch_size, spec.num_kv_heads, pages)
        key, value = (jnp.zeros((*shape, size), spec.dtype) for size in (spec.head_dim, spec.value_dim))
        none = jnp.zeros(shape, jnp.int32)
        return Clusters(key, None if spec.latent else value, none, jnp.zeros((*shape, self.page_size), jnp.int32), none)

    def counts(self, index: Clusters) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Clusters:
        batch, heads, pages, p, size = k.shape
        together = min(pages, STRETCH // p)
        padding = [(0, 0), (0, 0), (0, -pages % together), (0, 0)]
        count = mask.sum(-1, dtype=jnp.int32)
        both = k if v is None else jnp.concatenate([k, v], axis=-1)
        both = jnp.pad(jnp.where(mask[..., None], both, 0).astype(jnp.float32), [*padding, (0, 0)])
        both, there = (x.reshape(batch, heads, -1, together * p, *x.shape[4:]) for x in (both, jnp.pad(mask, padding)))
        few = jnp.maximum(there.reshape(*there.shape[:3], together, p).any(-1).sum(-1, dtype=jnp.int32), 1)
        tokens = jnp.maximum(count.sum(-1), 1).astype(jnp.float32)[..., None, None, None]
        keys = both[..., :size] - both[..., :size].sum((2, 3), keepdims=True) / tokens
        options = dict(cosine=True, few=few)
        codes = nearest(keys, kmeans(keys, there, count=together, iterations=self.iterations - 1, **options), **options)
        total, members = sums(both, codes, there, count=together)
        mean = total / jnp.maximum(members, 1)[..., None].astype(jnp.float32)
        away = codes.reshape(*codes.shape[:3], together, p) - jnp.arange(together, dtype=jnp.int32)[None, None, None, :, None]
        mean, members, away = (x.reshape(batch, heads, -1, *x.shape[4:])[:, :, :pages] for x in (mean, members, away))
        value = None if v is None else mean[..., size:].astype(v.dtype)
        return Clusters(mean[..., :size].astype(k.dtype), value, members, away, count)
