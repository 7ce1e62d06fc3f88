"""An index of tokens by locality-sensitive hashes of their keys: on which sides of random planes a key lies (SimHash).

Policy MagicPIG compares the hashes of queries with u16 hashes [B, K, P, p, L], L per token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from icejax.cache.index.base import CodesPerToken
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import EINSUM

TOGETHER = 128  # pages hashed at once


@functools.lru_cache(maxsize=4)
def planes(heads: int, size: int, count: int, seed: int) -> np.ndarray:
    """Returns the normals of `count` random planes, f32[heads, size, count], the same for the same seed."""
    return np.random.default_rng(seed).standard_normal((heads, size, count), np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hashes:
    """The hashes of every token, one for each table, and the mean key they are centred on.

    Attributes:
        mean: mean key of the first text with tokens in pages; 0 before.
        made: whether `mean` is set.
        codes: hashes of each slot of the pages.
        count: tokens of each page, in its first slots.
    """

    mean: jax.Array  # f32[B, K, H]
    made: jax.Array  # bool[B, K]
    codes: jax.Array  # u16[B, K, P, p, L]
    count: jax.Array  # i32[B, K, P]


@dataclass(frozen=True)
class HashIndex(CodesPerToken[Hashes]):
    """Hashes of keys minus the mean key of a row's first text; each table has its own planes, one per bit.

    Attributes:
        page_size: slots of a page.
        bits: planes of a table, at most 16.
        tables: hashes of a token, L.
        seed: seed of the planes.
    """

    page_size: int
    bits: int
    tables: int
    seed: int

    def empty(self, spec: CacheSpec, pages: int) -> Hashes:
        shape = (spec.batch_size, spec.num_kv_heads)
        codes = jnp.zeros((*shape, pages, self.page_size, self.tables), jnp.uint16)
        mean = jnp.zeros((*shape, spec.head_dim))
        return Hashes(mean, jnp.zeros(shape, bool), codes, jnp.zeros((*shape, pages), jnp.int32))

    def page_update(self, index: Hashes, described: tuple[jax.Array, jax.Array], first: Int[Array, ""]) -> Hashes:
        keys, mask = described
        count = mask.sum(-1, dtype=jnp.int32)
        tokens = count.sum(-1)
        mean = keys.astype(jnp.float32).sum((2, 3)) / jnp.maximum(tokens, 1)[..., None].astype(jnp.float32)
        mean = jnp.where(index.made[..., None], index.mean, mean)

        def page(x: Float[Array, "B K p H"]) -> UInt[Array, "B K p L"]:
            return self.hashed(x.astype(jnp.float32) - mean[:, :, None])

        codes = jax.lax.map(page, keys.transpose(2, 0, 1, 3, 4), batch_size=TOGETHER).transpose(1, 2, 0, 3, 4)
        return Hashes(mean, index.made | (tokens > 0), codes, count)

    def hashed(self, x: Float[Array, "B K n H"]) -> UInt[Array, "B K n L"]:
        """Returns the hashes of fp32 vectors.

        A vector on the positive side of planes 0 and 2 of a table has the hash 2^0 + 2^2 = 5 there.
        """
        sides = EINSUM("bknh,khc->bknc", x, planes(*x.shape[1::2], self.tables * self.bits, self.seed)) > 0
        sides = sides.reshape(*x.shape[:3], self.tables, self.bits)
        bits = jnp.left_shift(1, jnp.arange(self.bits))[None, None, None, None]
        return jnp.where(sides, bits, 0).sum(-1).astype(jnp.uint16)
