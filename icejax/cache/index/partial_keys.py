"""An index of tokens by the part of their keys that lies in the directions a text's queries have most of."""

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
    """Directions, and how far the key of every token goes in each.

    Attributes:
        directions: at right angles, made of a row's prompt; 0 before.
        codes: of the slots of every page.
        count: tokens of every page, in its first slots.
    """

    directions: jax.Array  # f32[B, K, H, d]
    codes: jax.Array  # dtype[B, K, P, p, d]
    count: jax.Array  # i32[B, K, P]


@dataclass(frozen=True)
class PartialIndex(CodesPerToken[Partial]):
    """Keys in a few directions.

    Attributes:
        page_size: slots of a page.
        share: how many directions there are, of as many as channels.
    """

    page_size: int
    share: float

    def empty(self, spec: CacheSpec, pages: int) -> Partial:
        shape, some = (spec.batch_size, spec.num_kv_heads), max(1, int(self.share * spec.head_dim))
        codes = jnp.zeros((*shape, pages, self.page_size, some), spec.dtype)
        return Partial(jnp.zeros((*shape, spec.head_dim, some)), codes, jnp.zeros((*shape, pages), jnp.int32))

    def page_update(self, index: Partial, described: tuple[jax.Array, jax.Array], first: Int[Array, ""]) -> Partial:
        keys, mask = described
        codes = EINSUM("bkpsh,bkhd->bkpsd", keys.astype(jnp.float32), index.directions).astype(index.codes.dtype)
        return Partial(index.directions, codes, mask.sum(-1, dtype=jnp.int32))


def directions_of(q: Float[Array, "B T K G H"], new: Int[Array, " B"], *, count: int) -> Float[Array, "B K H {count}"]:
    """Returns the directions in which the first `new` queries have most, of the main ones of each KV head.

    All main directions together keep every product of a query and a key: they are at right angles.
    """
    there = (jnp.arange(q.shape[1])[None] < new[:, None])[:, :, None, None, None]
    q = jnp.where(there, q, 0).astype(jnp.float32)
    main = jnp.linalg.eigh(EINSUM("btkgh,btkgi->bkhi", q, q))[1]
    most = jnp.abs(EINSUM("btkgh,bkhi->btkgi", q, main)).sum((1, 3))
    return jnp.take_along_axis(main, jax.lax.top_k(most, count)[1][:, :, None], axis=3)
