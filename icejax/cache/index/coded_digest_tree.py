"""A digest tree together with the key codes of all tokens (`icejax.ops.pages.key_codes`); policy Coded selects by both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.index.base import PageNumber, move_pages, put_pages
from icejax.cache.index.digest_tree import Described, Digested, DigestTree
from icejax.cache.sizes import CacheSpec
from icejax.ops.pages import key_codes
from icejax.ops.pages.digests import Digests
from icejax.ops.pages.key_codes import KeyCodes

Update = tuple[tuple[Digests, ...], KeyCodes]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedIndex(Digested):
    """The digests of all pages, and the codes of their keys.

    Attributes:
        codes: codes of the keys of all pages.
    """

    codes: KeyCodes


@dataclass(frozen=True)
class CodedTree(DigestTree):
    """Builds and updates a `CodedIndex`.

    Attributes:
        page_size: slots of a page.
        bits: bits of a code, one code per channel of a key.
    """

    page_size: int
    bits: int

    def empty(self, spec: CacheSpec, pages: int) -> CodedIndex:
        shape = (spec.batch_size, spec.num_kv_heads, pages)
        codes = key_codes.empty_codes(shape, self.page_size, spec.head_dim, self.bits, spec.dtype)
        return CodedIndex(**vars(super().empty(spec, pages)), codes=codes)

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Described:
        return *super().describe(k, v, mask), key_codes.encode_keys(k, mask, self.bits)

    def of_prompt(self, index: CodedIndex, described: Described) -> CodedIndex:
        codes = put_pages(index.codes, described[2], jnp.int32(0))
        return replace(super().of_prompt(index, described), codes=codes)

    def page_update(self, index: CodedIndex, described: Described, first: Int[Array, ""]) -> Update:
        return super().page_update(index, described, first), described[2]

    def apply_update(self, index: CodedIndex, update: Update, first: Int[Array, ""]) -> CodedIndex:
        levels, codes = update
        return replace(super().apply_update(index, levels, first), codes=put_pages(index.codes, codes, first))

    def after_move(
        self, index: CodedIndex, ids: Int[Array, " M"], there: Bool[Array, " M"], first: Int[Array, ""], *, behind: PageNumber
    ) -> CodedIndex:
        codes = move_pages(index.codes, ids, there, first, behind=behind)
        return replace(super().after_move(index, ids, there, first, behind=behind), codes=codes)
