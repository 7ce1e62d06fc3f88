"""Key codes: a few bits per channel of a token's key, so that tokens are ranked before any of them is fetched.

`code_attention` encodes pages [B, K, P, p, H], and decodes the pages that a step reads. Keys are quantised per channel as in
KIVI (arXiv 2402.02750), here within a page, whose keys are similar. A channel's offset and step are then fitted to its keys by
least squares. Values are encoded by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

from icejax.ops.pages.digests import NARROW, Vectors

FIELDS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}  # a code of 3 bits is packed as its low 2 bits and its high bit
BITS = tuple(FIELDS)
TOGETHER = 128  # pages encoded at a time; all at once would need an fp32 copy of the keys


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyCodes:
    """The keys of pages in a few bits per channel: a key is about `low + code * step`.

    Attributes:
        codes: codes of a page, slot after slot; a byte holds channels c, c + H * bits / 8, and so on. Of 4 bits and H = 4 the
            codes 1, 2, 3, 4 are the bytes 1 + 16 * 3 = 49 and 2 + 16 * 4 = 66.
        low: the value of code 0, per channel; `Vectors` in a dtype of `NARROW`.
        step: the difference between neighbouring codes, per channel.
    """

    codes: jax.Array  # u8[B, K, P, p * H * bits / 8], H filled up to whole bytes
    low: jax.Array | Vectors  # dtype[B, K, P, H]
    step: jax.Array | Vectors  # dtype[B, K, P, H]


def encode_keys(k: Float[Array, "B K P p H"], mask: Bool[Array, "B K P p"], bits: int, scales: str) -> KeyCodes:
    """Returns the codes of pages; slots outside `mask` are not read.

    Args:
        scales: dtype of `low` and `step`, which are rounded before the codes are chosen.
    """

    def page(x: tuple[jax.Array, jax.Array]) -> KeyCodes:
        valid, max_code = x[1][..., None], 2**bits - 1
        keys = jnp.clip(jnp.where(valid, x[0], 0).astype(jnp.float32), -3e38, 3e38)
        least, largest = (f(jnp.where(valid, keys, fill), axis=2) for f, fill in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
        least, largest = (jnp.where(x[1].any(-1)[..., None], y, 0) for y in (least, largest))
        codes = _nearest_codes(keys, valid, least, largest - least, max_code)
        low, step = (_stored(y, scales) for y in _nearest_line(codes, keys, x[1].astype(jnp.float32)[..., None]))
        first, width = _read(low).astype(jnp.float32), _read(step).astype(jnp.float32) * max_code
        codes = _nearest_codes(keys, valid, first, width, max_code)
        return KeyCodes(_packed(codes.astype(jnp.uint8), bits), low, step)

    by_page = jax.lax.map(page, (k.transpose(2, 0, 1, 3, 4), mask.transpose(2, 0, 1, 3)), batch_size=TOGETHER)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), by_page)


def decode_keys(codes: KeyCodes, page_size: int, bits: int, dtype: str) -> Float[Array, "B K P p H"]:
    """Returns the decoded keys in `dtype`, which is also that of the arithmetic; empty slots hold `low`."""
    low, step = (_read(x).astype(dtype) for x in (codes.low, codes.step))
    packed = codes.codes.reshape(*codes.codes.shape[:3], page_size, -1)
    return low[..., None, :] + _unpacked(packed, low.shape[-1], bits).astype(low.dtype) * step[..., None, :]


def _nearest_codes(
    keys: Float[Array, "B K p H"],
    valid: Bool[Array, "B K p 1"],
    low: Float[Array, "B K H"],
    width: Float[Array, "B K H"],
    max_code: int,
) -> Float[Array, "B K p H"]:
    """Returns the nearest of the codes 0 to `max_code`, which stand for values from `low` to `low + width`."""
    ratio = (keys - low[:, :, None]) / jnp.maximum(width, 1e-30)[:, :, None]
    return jnp.where(valid, jnp.round(jnp.clip(ratio, 0, 1) * max_code), 0)


def _stored(x: Float[Array, "B K H"], dtype: str) -> jax.Array | Vectors:
    vectors = Vectors.store(x, dtype)
    return vectors if dtype in NARROW else vectors.data


def _read(x: jax.Array | Vectors) -> jax.Array:
    return x.read() if isinstance(x, Vectors) else x


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
    fields, low_bits = [], 0
    for field in FIELDS[bits]:
        missing = _bytes(codes.shape[-1], field) * (8 // field) - codes.shape[-1]
        values = jnp.pad(codes >> low_bits & (2**field - 1), [(0, 0)] * 3 + [(0, missing)])
        parts = jnp.split(values, 8 // field, axis=-1)
        fields.append(sum(part << i * field for i, part in enumerate(parts)))
        low_bits += field
    return jnp.concatenate(fields, axis=-1).astype(jnp.uint8).reshape(*codes.shape[:2], -1)


def _unpacked(packed: UInt[Array, "B K P p n"], size: int, bits: int) -> UInt[Array, "B K P p H"]:
    codes, start, low_bits = 0, 0, 0
    for field in FIELDS[bits]:
        data = packed[..., start : start + _bytes(size, field)]
        parts = [data >> shift & (2**field - 1) for shift in range(0, 8, field)]
        codes += jnp.concatenate(parts, axis=-1)[..., :size] << low_bits
        start, low_bits = start + data.shape[-1], low_bits + field
    return codes


def _bytes(size: int, bits: int) -> int:
    """Returns the bytes of one key's codes."""
    return sum(-(-size * field // 8) for field in FIELDS[bits])
