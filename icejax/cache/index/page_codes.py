"""An index with all tokens of all pages in codes of a few bits; policy Packed weighs tokens by it and attends to it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.index.base import PageIndex
from icejax.cache.sizes import CacheSpec
from icejax.ops.pages.code_attention import CodedPages, encode_pages


@dataclass(frozen=True)
class PageCodes(PageIndex[CodedPages, CodedPages, CodedPages]):
    """Builds and updates `CodedPages`.

    Attributes:
        page_size: slots of a page.
        bits: bits of a code, one code per channel of a key or value.
    """

    page_size: int
    bits: int

    def empty(self, spec: CacheSpec, pages: int) -> CodedPages:
        shape = (spec.batch_size, spec.num_kv_heads, pages, self.page_size)
        k, *v = (jax.ShapeDtypeStruct((*shape, size), spec.dtype) for size in spec.planes)
        described = jax.eval_shape(self.describe, k, v[0] if v else None, jax.ShapeDtypeStruct(shape, bool))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), described)

    def counts(self, index: CodedPages) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> CodedPages:
        return encode_pages(k, v, mask, self.bits)

    def flush_slice(self, index: CodedPages, page: Int[Array, ""]) -> None:
        """Returns nothing: a new page does not depend on the others."""
        del index, page
