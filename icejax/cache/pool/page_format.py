"""The bit patterns of pages in the pool: the dtype's own bits, or int8 with a scale per page and channel.

The host pool encodes the pages [..., p, H] it writes and decodes those it reads. All planes have one width. An int8 page of
p = 16 slots is uint8 [18, H]: 16 rows of codes, then the 2 bytes of each channel's bf16 scale. A policy may also keep codes of
every page, which are bytes to the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt

from icejax.ops.quantized.rounding import TINY, dequantize, quantize

BYTES = "uint8"  # the dtype of codes
SCALE_ROWS = 2  # bytes of a channel's bf16 scale, one below the other after the codes


class PagesWithCodes(NamedTuple):
    """Pages and their codes: of the pool, of an extent, or new ones. Pages without codes are an array alone.

    Attributes:
        pages: [..., K, planes, rows, W].
        codes: a run of n bytes for each page, u8[..., K, 1, 1, n]; the other axes are those of `pages`.
    """

    pages: jax.Array
    codes: jax.Array


NoPages = tuple[()]  # the pages of a pool without planes, whose policy keeps all of a token on the device
PagePlanes = Sequence[Float[Array, "B K P p _"]]  # the planes of pages before they are stacked
Stored = Float[Array, "*P planes p W"] | PagesWithCodes | NoPages  # pages as the pool keeps them


def without_codes(pages: jax.Array | PagesWithCodes | NoPages) -> jax.Array | NoPages:
    """Returns the pages alone."""
    return pages.pages if isinstance(pages, PagesWithCodes) else pages


def bits_dtype(dtype: str) -> np.dtype:
    """Returns the unsigned integer dtype as wide as `dtype`."""
    return np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def pool_shapes(shape: tuple[int, ...], dtype: str, codes: int = 0) -> Any:
    """Returns the shapes and bit patterns of the arrays of a pool, from what `allocation.allocate` takes; () without planes."""
    if not shape[4]:
        return ()
    pages = jax.ShapeDtypeStruct(shape, bits_dtype(dtype))
    return PagesWithCodes(pages, jax.ShapeDtypeStruct((*shape[:4], 1, 1, codes), BYTES)) if codes else pages


def pool_bytes(pool: Any) -> int:
    """Returns the bytes of a pool, or of its `pool_shapes`."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pool))


def page_rows(page_size: int, dtype: str) -> int:
    """Returns the rows of a page in a pool of `dtype`: its slots, and with int8 the scale's rows."""
    return page_size + SCALE_ROWS if dtype == "int8" else page_size


def stack_planes(planes: Sequence[Float[Array, "*P p _"]]) -> Float[Array, "*P planes p W"]:
    """Returns the planes of pages stacked, narrower ones padded with zeros to the widest."""
    width = max(x.shape[-1] for x in planes)
    return jnp.stack([jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) for x in planes], axis=-3)


def encode_pages(pages: Float[Array, "*P p H"] | UInt[Array, "*P p H"], bits: np.dtype) -> UInt[Array, "*P rows H"]:
    """Returns the bit patterns of pages in a pool of dtype `bits`.

    A uint8 pool holds symmetric int8 codes: a channel's scale is its largest magnitude in the page divided by 127. Pages that
    are bytes already stay as they are.
    """
    if pages.dtype == bits:
        return pages
    if bits != np.uint8:
        return lax.bitcast_convert_type(pages, bits)
    codes, scale = quantize(pages, "int8", axis=-2, scale_dtype="bfloat16", least=TINY / 127)
    scale = jnp.moveaxis(lax.bitcast_convert_type(scale[..., 0, :], jnp.uint8), -1, -2)
    return jnp.concatenate([lax.bitcast_convert_type(codes, jnp.uint8), scale], axis=-2)


def decode_pages(bits: UInt[Array, "*P rows H"], dtype: str) -> Float[Array, "*P p H"] | UInt[Array, "*P p H"]:
    """Returns the pages that `encode_pages` took: exact, or with int8 to half a 127th of a channel's largest magnitude."""
    if bits.dtype != jnp.uint8 or dtype == BYTES:
        return lax.bitcast_convert_type(bits, dtype)
    scale = lax.bitcast_convert_type(jnp.moveaxis(bits[..., -SCALE_ROWS:, :], -2, -1), jnp.bfloat16)
    codes = lax.bitcast_convert_type(bits[..., :-SCALE_ROWS, :], jnp.int8)
    return dequantize(codes, scale[..., None, :]).astype(dtype)
