"""The codes of a page as one run of bytes, so that one copy brings them from host memory.

Policies that keep codes in the host pool write them with `PageBytes.write` and read them with `PageBytes.read`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from icejax.ops.pages.code_attention import CodedPages, encode_pages


@dataclass(frozen=True)
class PageBytes:
    """How a page lies in bytes: codes, offsets with their scale and steps with their scale, of its keys, then of its values.

    A page of 16 keys and values of 64 channels in 4 bits takes 2 x (512 + 68 + 68) = 1,296 bytes.

    Attributes:
        page_size: slots of a page.
        sizes: channels of keys and of values; of keys alone where they hold the values.
        bits: bits of a code.
    """

    page_size: int
    sizes: tuple[int, ...]
    bits: int

    @property
    def count(self) -> int:
        """How many bytes a page takes."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self._parts((1, 1, 1)))

    def write(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> UInt[Array, "B K P n"]:
        """Returns the codes of pages; slots outside `mask` are not read."""
        coded = encode_pages(k, v, mask, self.bits)
        parts = (lax.bitcast_convert_type(x, jnp.uint8) for x in jax.tree.leaves((coded.keys, coded.values)))
        return jnp.concatenate([x.reshape(*mask.shape[:3], -1) for x in parts], axis=-1)

    def read(self, data: UInt[Array, "B K P n"], count: Int[Array, "B K P"]) -> CodedPages:
        """Returns the codes of pages that hold `count` tokens; the bytes of a page without a token may be anything."""
        data, parts, first = jnp.where(count[..., None] > 0, data, 0), [], 0
        shapes = self._parts(count.shape)
        for x in shapes:
            size = math.prod(x.shape[3:]) * x.dtype.itemsize
            part = data[..., first : first + size]
            part = part.reshape(*x.shape, x.dtype.itemsize) if x.dtype.itemsize > 1 else part.reshape(x.shape)
            parts.append(lax.bitcast_convert_type(part, x.dtype))
            first += size
        keys, values = jax.tree.unflatten(jax.tree.structure(self._shapes(count.shape)), parts)
        return CodedPages(count, keys, values)

    def _parts(self, pages: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(self._shapes(pages))

    def _shapes(self, pages: tuple[int, ...]) -> tuple:
        """Returns shapes and dtypes of the codes of keys and of values of [B, K, P] pages."""
        k, *v = (jax.ShapeDtypeStruct((*pages, self.page_size, size), "float32") for size in self.sizes)
        mask = jax.ShapeDtypeStruct((*pages, self.page_size), bool)
        coded = jax.eval_shape(lambda k, v, mask: encode_pages(k, v, mask, self.bits), k, v[0] if v else None, mask)
        return coded.keys, coded.values
