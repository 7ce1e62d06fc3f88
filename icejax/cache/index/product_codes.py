"""An index of tokens by product quantisation: the device keeps the nearest centroid of each part of a token's key.

Policies PQCache and ClusterKV score queries [B, K, G, H] with the centroids instead of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.cache.index.base import CodesPerToken
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import EINSUM
from icejax.ops.pages.kmeans import kmeans, nearest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProductCodes:
    """Centroids of each part of the keys, and the centroid of each token's parts.

    Attributes:
        centroids: C centroids of each part, computed from a row's first text with tokens in pages; 0 before.
        made: whether the row's centroids are set.
        codes: centroid indices of each slot, one per part.
        count: tokens of each page, in its first slots.
    """

    centroids: jax.Array  # f32[B, K, parts, C, H / parts]
    made: jax.Array  # bool[B, K]
    codes: jax.Array  # uint[B, K, P, p, parts]
    count: jax.Array  # i32[B, K, P]


@dataclass(frozen=True)
class ProductCodesIndex(CodesPerToken[ProductCodes]):
    """k-means over the keys of a row's first text, part by part; later tokens are coded by the same centroids.

    Attributes:
        page_size: slots of a page.
        parts: runs of channels with their own centroids; divides the channels.
        centroids: centroids of each part.
        iterations: iterations of k-means.
        cosine: whether the nearest centroid has the smallest angle, not the smallest distance.
    """

    page_size: int
    parts: int
    centroids: int
    iterations: int
    cosine: bool = False

    def empty(self, spec: CacheSpec, pages: int) -> ProductCodes:
        shape, size = (spec.batch_size, spec.num_kv_heads), spec.head_dim // self.parts
        return ProductCodes(
            jnp.zeros((*shape, self.parts, self.centroids, size)),
            jnp.zeros(shape, bool),
            jnp.zeros((*shape, pages, self.page_size, self.parts), np.min_scalar_type(self.centroids - 1)),
            jnp.zeros((*shape, pages), jnp.int32),
        )

    def page_update(self, index: ProductCodes, described: tuple[jax.Array, jax.Array], first: Int[Array, ""]) -> ProductCodes:
        keys, mask = described
        batch, heads, _, p, size = keys.shape
        keys = keys.reshape(batch, heads, -1, self.parts, size // self.parts).swapaxes(2, 3)
        valid = jnp.broadcast_to(mask.reshape(batch, heads, 1, -1), keys.shape[:4])

        def fit_centroids() -> jax.Array:
            new = kmeans(keys, valid, count=self.centroids, iterations=self.iterations, cosine=self.cosine)
            return jnp.where(index.made[..., None, None, None], index.centroids, new)

        centroids = jax.lax.cond(index.made.all(), lambda: index.centroids, fit_centroids)
        codes = nearest(keys, centroids, cosine=self.cosine).swapaxes(2, 3).reshape(batch, heads, -1, p, self.parts)
        count = mask.sum(-1, dtype=jnp.int32)
        return ProductCodes(centroids, index.made | (count > 0).any(-1), codes.astype(index.codes.dtype), count)


def approximate(q: Float[Array, "B K G H"], index: ProductCodes) -> Float[Array, "B K G S"]:
    """Returns the products of queries with each slot's centroids in the place of its key, in fp32.

    With H = 4, two parts and a key coded (3, 0): q[:2] . centroids[0, 3] + q[2:] . centroids[1, 0].
    """
    batch, heads, group, _ = q.shape
    parts = index.centroids.shape[2]
    queries = q.reshape(batch, heads, group, parts, -1).astype(jnp.float32)
    table = EINSUM("bkgmh,bkmch->bkgmc", queries, index.centroids)
    codes = index.codes.reshape(batch, heads, 1, -1, parts).astype(jnp.int32)
    codes = jnp.broadcast_to(codes, (batch, heads, group, *codes.shape[3:]))
    return sum(jnp.take_along_axis(table[..., part, :], codes[..., part], axis=-1) for part in range(parts))
