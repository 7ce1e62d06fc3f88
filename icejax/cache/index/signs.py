"""An index of tokens by four bits per channel of their rotated keys: a sign and one of eight sizes.

Policy ParisKV estimates query-key products by it. A random rotation makes all channels alike, so that nothing is fitted to the
keys [B, K, P, p, H]: the distribution of a channel's share of its block's length is known beforehand, and so are the sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.cache.index.base import CodesPerToken
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import EINSUM

TOGETHER = 128  # pages coded at once
BLOCK = 8  # channels with one stored length
# For a channel of a unit vector in eight dimensions: the bounds between sizes, and the value that stands for each size.
EDGES = (0.0843, 0.1698, 0.2578, 0.3499, 0.4487, 0.5585, 0.6901)
SIZES = (0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633)


@functools.lru_cache(maxsize=4)
def turn(size: int, seed: int) -> np.ndarray:
    """Returns the random rotation f32[size, channels(size)]: random signs times rows of a Hadamard matrix, orthonormal rows."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < channels(size):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size)
    return (signs[:, None] * hadamard[:size] / channels(size) ** 0.5).astype(np.float32)


def channels(size: int) -> int:
    """Returns the channels of a rotated vector: the least power of two that is at least `size`, and at least 8."""
    return max(BLOCK, 1 << (size - 1).bit_length())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Signs:
    """The codes of each slot of the pages.

    Attributes:
        codes: four bits for each of C rotated channels, two channels in a byte, the sign as the highest bit; and a length for
            each block of eight channels, by which the decoded block is multiplied.
        count: tokens of each page, in its first slots.
    """

    codes: tuple[jax.Array, jax.Array]  # u8[B, K, P, p, C / 2], bf16[B, K, P, p, C / 8]
    count: jax.Array  # i32[B, K, P]


@dataclass(frozen=True)
class SignsIndex(CodesPerToken[Signs]):
    """Codes of rotated keys.

    Attributes:
        page_size: slots of a page.
        seed: seed of the rotation.
    """

    page_size: int
    seed: int

    def empty(self, spec: CacheSpec, pages: int) -> Signs:
        shape, size = (spec.batch_size, spec.num_kv_heads, pages), channels(spec.head_dim)
        codes = jnp.zeros((*shape, self.page_size, size // 2), jnp.uint8)
        return Signs((codes, jnp.zeros((*shape, self.page_size, size // BLOCK), jnp.bfloat16)), jnp.zeros(shape, jnp.int32))

    def page_update(self, index: Signs, described: tuple[jax.Array, jax.Array], first: Int[Array, ""]) -> Signs:
        keys, mask = described

        def page(x: Float[Array, "B K p H"]) -> tuple[jax.Array, jax.Array]:
            blocks = self.turned(x)
            length = jnp.linalg.norm(blocks, axis=-1)
            shares = jnp.abs(blocks) / jnp.maximum(length, 1e-30)[..., None]
            size = sum((shares > edge).astype(jnp.int32) for edge in EDGES)
            fit = (jnp.float32(SIZES)[size] * shares).sum(-1)  # projection of the decoded block to the true direction
            code = (jnp.where(blocks >= 0, 8, 0) + size).reshape(*x.shape[:-1], -1, 2)
            return (code[..., 0] + 16 * code[..., 1]).astype(jnp.uint8), (length / jnp.maximum(fit, 1e-6)).astype(jnp.bfloat16)

        codes = jax.lax.map(page, keys.transpose(2, 0, 1, 3, 4), batch_size=TOGETHER)
        return Signs(tuple(x.transpose(1, 2, 0, 3, 4) for x in codes), mask.sum(-1, dtype=jnp.int32))

    def turned(self, x: Float[Array, "*R H"]) -> Float[Array, "*R b 8"]:
        """Returns the rotated vectors in fp32, in blocks of eight channels."""
        y = EINSUM("...h,hi->...i", x.astype(jnp.float32), turn(x.shape[-1], self.seed))
        return y.reshape(*x.shape[:-1], -1, BLOCK)


def patterns(index: Signs) -> Int[Array, "B K S b"]:
    """Returns the signs of each slot's blocks of eight channels as a number: bit i is set if channel i is not negative.

    A block with the signs + - + - - - - - has the pattern 2^0 + 2^2 = 5.
    """
    bytes_ = index.codes[0]
    pairs = bytes_.reshape(*bytes_.shape[:2], -1, bytes_.shape[-1] // (BLOCK // 2), BLOCK // 2).astype(jnp.int32)
    bits = (pairs >> 3 & 1) + (pairs >> 6 & 2)
    return sum(bits[..., i] << 2 * i for i in range(BLOCK // 2))


def estimated(q: Float[Array, "B K b 8"], index: Signs) -> Float[Array, "B K S"]:
    """Returns the estimated products of rotated queries with the keys of all slots."""
    codes, length = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in index.codes)
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.int32).reshape(*length.shape, BLOCK)
    value = jnp.float32(SIZES)[nibbles & 7] * jnp.where(nibbles > 7, 1.0, -1.0)
    return (EINSUM("bkci,bksci->bksc", q, value) * length.astype(jnp.float32)).sum(-1)
