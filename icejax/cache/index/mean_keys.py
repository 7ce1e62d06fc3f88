"""An index of pages by their mean keys, with pages that every decode step attends to.

Policy ShadowKV scores the means [B, K, P, H] with the queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.index.base import PageIndex
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import EINSUM


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Landmarks:
    """The mean key of each page, whether every step attends to the page, and its tokens."""

    mean: jax.Array  # dtype[B, K, P, H]
    kept: jax.Array  # bool[B, K, P]
    count: jax.Array  # i32[B, K, P]


class LandmarkIndex(PageIndex[Landmarks, Landmarks, Landmarks]):
    """Builds the mean keys of pages; new pages have `kept` False."""

    def empty(self, spec: CacheSpec, pages: int) -> Landmarks:
        shape = (spec.batch_size, spec.num_kv_heads, pages)
        mean = jnp.zeros((*shape, spec.head_dim), spec.dtype)
        return Landmarks(mean, jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))

    def counts(self, index: Landmarks) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Landmarks:
        count = mask.sum(-1, dtype=jnp.int32)
        total = jnp.where(mask[..., None], k, 0).astype(jnp.float32).sum(3)
        mean = total / jnp.maximum(count, 1)[..., None].astype(jnp.float32)
        return Landmarks(mean.astype(k.dtype), jnp.zeros(count.shape, bool), count)


def least_cosine(keys: Float[Array, "P B K p H"], landmarks: Landmarks) -> Float[Array, "B K P"]:
    """Returns the smallest cosine between a key and the mean key of its page, for the first P pages; inf for an empty page.

    Args:
        keys: keys of the first P pages of the pool.
        landmarks: mean keys of all pages.
    """
    pages, size = len(keys), keys.shape[3]
    mean, count = landmarks.mean[:, :, :pages].astype(jnp.float32), landmarks.count[:, :, :pages]
    keys = keys.transpose(1, 2, 0, 3, 4).astype(jnp.float32)
    norms = jnp.linalg.norm(keys, axis=-1) * jnp.linalg.norm(mean, axis=-1)[..., None]
    cosine = EINSUM("bkpsh,bkph->bkps", keys, mean) / jnp.maximum(norms, 1e-30)
    mask = jnp.arange(size)[None, None, None] < count[..., None]
    return jnp.where(mask, cosine, jnp.inf).min(-1)
