"""An index of tokens by partial keys: keys projected to the few directions in which the prompt's queries are largest.

Policy InfiniGen scores queries with the projected keys [B, K, P, p, d].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from icejax.cache.index.base import CodesPerToken
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import EINSUM


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial:
    """Directions, and the projections of all keys to them.

    Attributes:
        directions: orthonormal columns, computed from a row's prompt; 0 before.
        codes: projections of each slot's key.
        count: tokens of each page, in its first slots.
    """

    directions: jax.Array  # f32[B, K, H, d]
    codes: jax.Array  # dtype[B, K, P, p, d]
    count: jax.Array  # i32[B, K, P]


@dataclass(frozen=True)
class PartialIndex(CodesPerToken[Partial]):
    """Projects keys to a few directions.

    Attributes:
        page_size: slots of a page.
        share: number of directions, as a share of the channels.
    """

    page_size: int
    share: float

    def empty(self, spec: CacheSpec, pages: int) -> Partial:
        shape, num_directions = (spec.batch_size, spec.num_kv_heads), max(1, int(self.share * spec.head_dim))
        codes = jnp.zeros((*shape, pages, self.page_size, num_directions), spec.dtype)
        return Partial(jnp.zeros((*shape, spec.head_dim, num_directions)), codes, jnp.zeros((*shape, pages), jnp.int32))

    def page_update(self, index: Partial, described: tuple[jax.Array, jax.Array], first: Int[Array, ""]) -> Partial:
        keys, mask = described
        codes = EINSUM("bkpsh,bkhd->bkpsd", keys.astype(jnp.float32), index.directions).astype(index.codes.dtype)
        return Partial(index.directions, codes, mask.sum(-1, dtype=jnp.int32))


def directions_of(q: Float[Array, "B T K G H"], new: Int[Array, " B"], *, count: int) -> Float[Array, "B K H {count}"]:
    """Returns the `count` principal directions of a KV head's queries in which the queries are largest, by absolute sums.

    Principal directions are orthonormal, so that all H of them together preserve every query-key product.

    Args:
        new: real queries of each row; the rest is padding.
    """
    valid = (jnp.arange(q.shape[1])[None] < new[:, None])[:, :, None, None, None]
    q = jnp.where(valid, q, 0).astype(jnp.float32)
    axes = jnp.linalg.eigh(EINSUM("btkgh,btkgi->bkhi", q, q))[1]
    sizes = jnp.abs(EINSUM("btkgh,bkhi->btkgi", q, axes)).sum((1, 3))
    return jnp.take_along_axis(axes, jax.lax.top_k(sizes, count)[1][:, :, None], axis=3)
