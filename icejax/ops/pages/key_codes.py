"""Key codes: a few bits of every channel of a token's key, so that tokens can be ranked before any of them is fetched.

As KIVI (arXiv 2402.02750) quantises keys, channel by channel, here within a page, whose keys are alike. What a code stands for
is then moved to where the keys that have it lie in the mean, by least squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

BITS = (1, 2, 4)
TOGETHER = 128  # pages that are coded at once: all of a long text would be a copy of it in fp32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyCodes:
    """The keys of pages in a few bits: `low + code * step`.

    Attributes:
        codes: of the slots of a page, one behind another; a byte holds channels c, c + H * bits / 8, and so on.
        low: what code 0 stands for, by channel.
        step: how far apart codes are.
    """

    codes: jax.Array  # u8[B, K, P, p * H * bits / 8], H filled up to whole bytes
    low: jax.Array  # dtype[B, K, P, H]
    step: jax.Array  # dtype[B, K, P, H]


def empty_codes(shape: tuple[int, int, int], page_size: int, size: int, bits: int, dtype: str) -> KeyCodes:
    """Returns the codes of pages [B, K, P] without a token, of keys of `size` channels."""
    nothing = jnp.zeros((*shape, size), dtype)
    return KeyCodes(jnp.zeros((*shape, page_size * _bytes(size, bits)), jnp.uint8), nothing, nothing)


def encode_keys(k: Float[Array, "B K P p H"], mask: Bool[Array, "B K P p"], bits: int) -> KeyCodes:
    """Returns the codes of pages, with `low` and `step` in the dtype of `k`; slots outside `mask` are not read."""

    def page(x: tuple[jax.Array, jax.Array]) -> KeyCodes:
        there, most = x[1][..., None], 2**bits - 1
        keys = jnp.clip(jnp.where(there, x[0], 0).astype(jnp.float32), -3e38, 3e38)
        least, largest = (f(jnp.where(there, keys, fill), axis=2) for f, fill in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
        least, largest = (jnp.where(x[1].any(-1)[..., None], y, 0) for y in (least, largest))
        ratio = (keys - least[:, :, None]) / jnp.maximum(largest - least, 1e-30)[:, :, None]
        codes = jnp.where(there, jnp.round(jnp.clip(ratio, 0, 1) * most), 0)
        low, step = _nearest_line(codes, keys, x[1].astype(jnp.float32)[..., None])
        return KeyCodes(_packed(codes.astype(jnp.uint8), bits), low.astype(k.dtype), step.astype(k.dtype))

    by_page = jax.lax.map(page, (k.transpose(2, 0, 1, 3, 4), mask.transpose(2, 0, 1, 3)), batch_size=TOGETHER)
    return jax.tree.map(lambda x: x.transpose(1, 2, 0, 3), by_page)


def decode_keys(codes: KeyCodes, page_size: int, bits: int) -> Float[Array, "B K P p H"]:
    """Returns about what the keys are, in the dtype of `low`."""
    size = codes.low.shape[-1]
    packed = codes.codes.reshape(*codes.codes.shape[:3], page_size, -1)
    parts = [packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
    each = jnp.concatenate(parts, axis=-1)[..., :size].astype(codes.low.dtype)
    return codes.low[..., None, :] + each * codes.step[..., None, :]


def _nearest_line(
    x: Float[Array, "B K p H"], y: Float[Array, "B K p H"], there: Float[Array, "B K p 1"]
) -> tuple[Float[Array, "B K H"], Float[Array, "B K H"]]:
    """Returns a and b of the line a + b x that is nearest to y; 0 of no tokens."""
    count = jnp.maximum(there.sum(2), 1.0)
    middle, height = ((z * there).sum(2) / count for z in (x, y))
    across, up = ((z - m[:, :, None]) * there for z, m in ((x, middle), (y, height)))
    slope = (across * up).sum(2) / jnp.maximum(jnp.square(across).sum(2), 1e-30)
    return height - slope * middle, slope


def _packed(codes: UInt[Array, "B K p H"], bits: int) -> UInt[Array, "B K n"]:
    """Returns several codes to a byte."""
    missing = _bytes(codes.shape[-1], bits) * (8 // bits) - codes.shape[-1]
    codes = jnp.pad(codes, [(0, 0)] * 3 + [(0, missing)])
    parts = jnp.split(codes, 8 // bits, axis=-1)
    return sum(part << i * bits for i, part in enumerate(parts)).astype(jnp.uint8).reshape(*codes.shape[:2], -1)


def _bytes(size: int, bits: int) -> int:
    """Returns how many bytes hold the codes of a key."""
    return -(-size * bits // 8)
