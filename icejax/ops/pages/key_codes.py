"""Key codes: a few bits per channel of a token's key, so that tokens are ranked before any of them is fetched.

Policy Coded's index encodes pages [B, K, P, p, H]; the policy decodes the pages it ranks. Keys are quantised per channel as in
KIVI (arXiv 2402.02750), here within a page, whose keys are similar. A channel's offset and step are then fitted to its keys by
least squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

BITS = (1, 2, 4)
TOGETHER = 128  # pages encoded at a time; all at once would need an fp32 copy of the keys


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyCodes:
    """The keys of pages in a few bits per channel: a key is about `low + code * step`.

    Attributes:
        codes: codes of a page, slot after slot; a byte holds channels c, c + H * bits / 8, and so on. Of 4 bits and H = 4 the
            codes 1, 2, 3, 4 are the bytes 1 + 16 * 3 = 49 and 2 + 16 * 4 = 66.
        low: the value of code 0, per channel.
        step: the difference between neighbouring codes, per channel.
    """

    codes: jax.Array  # u8[B, K, P, p * H * bits / 8], H filled up to whole bytes
    low: jax.Array  # dtype[B, K, P, H]
    step: jax.Array  # dtype[B, K, P, H]


def empty_codes(shape: tuple[int, int, int], page_size: int, size: int, bits: int, dtype: str) -> KeyCodes:
    """Returns the codes of empty pages; `shape` is (B, K, P), keys have `size` channels."""
    nothing = jnp.zeros((*shape, size), dtype)
    return KeyCodes(jnp.zeros((*shape, page_size * _bytes(size, bits)), jnp.uint8), nothing, nothing)


def encode_keys(k: Float[Array, "B K P p H"], mask: Bool[Array, "B K P p"], bits: int) -> KeyCodes:
    """Returns the codes of pages, with `low` and `step` in the dtype of `k`; slots outside `mask` are not read."""

    def page(x: tuple[jax.Array, jax.Array]) -> KeyCodes:
        valid, max_code = x[1][..., None], 2**bits - 1
        keys = jnp.clip(jnp.where(valid, x[0], 0).astype(jnp.float32), -3e38, 3e38)
        least, largest = (f(jnp.where(valid, keys, fill), axis=2) for f, fill in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
        least, largest = (jnp.where(x[1].any(-1)[..., None], y, 0) for y in (least, largest))
        ratio = (keys - least[:, :, None]) / jnp.maximum(largest - least, 1e-30)[:, :, None]
        codes = jnp.where(valid, jnp.round(jnp.clip(ratio, 0, 1) * max_code), 0)
        low, step = _nearest_line(codes, keys, x[1].astype(jnp.float32)[..., None])
        return KeyCodes(_packed(codes.astype(jnp.uint8), bits), low.astype(k.dtype), step.astype(k.dtype))

    by_page = jax.lax.map(page, (k.transpose(2, 0, 1, 3, 4), mask.transpose(2, 0, 1, 3)), batch_size=TOGETHER)
    return jax.tree.map(lambda x: x.transpose(1, 2, 0, 3), by_page)


def decode_keys(codes: KeyCodes, page_size: int, bits: int) -> Float[Array, "B K P p H"]:
    """Returns the decoded keys, in the dtype of `low`; empty slots hold `low`."""
    size = codes.low.shape[-1]
    packed = codes.codes.reshape(*codes.codes.shape[:3], page_size, -1)
    parts = [packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
    channel_codes = jnp.concatenate(parts, axis=-1)[..., :size].astype(codes.low.dtype)
    return codes.low[..., None, :] + channel_codes * codes.step[..., None, :]


def _nearest_line(
    x: Float[Array, "B K p H"], y: Float[Array, "B K p H"], valid: Float[Array, "B K p 1"]
) -> tuple[Float[Array, "B K H"], Float[Array, "B K H"]]:
    """Returns a and b of the least-squares line y = a + b x of each channel; 0 without a token."""
    count = jnp.maximum(valid.sum(2), 1.0)
    mean_x, mean_y = ((z * valid).sum(2) / count for z in (x, y))
    dx, dy = ((z - mean[:, :, None]) * valid for z, mean in ((x, mean_x), (y, mean_y)))
    slope = (dx * dy).sum(2) / jnp.maximum(jnp.square(dx).sum(2), 1e-30)
    return mean_y - slope * mean_x, slope


def _packed(codes: UInt[Array, "B K p H"], bits: int) -> UInt[Array, "B K n"]:
    """Returns the codes packed into bytes, slot after slot."""
    missing = _bytes(codes.shape[-1], bits) * (8 // bits) - codes.shape[-1]
    codes = jnp.pad(codes, [(0, 0)] * 3 + [(0, missing)])
    parts = jnp.split(codes, 8 // bits, axis=-1)
    return sum(part << i * bits for i, part in enumerate(parts)).astype(jnp.uint8).reshape(*codes.shape[:2], -1)


def _bytes(size: int, bits: int) -> int:
    """Returns the bytes of one key's codes."""
    return -(-size * bits // 8)
