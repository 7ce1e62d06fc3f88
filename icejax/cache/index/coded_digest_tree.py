"""A digest tree together with codes of all tokens (`icejax.ops.pages.code_attention`); policy Coded selects by both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.index.base import PageNumber, move_pages, put_pages
from icejax.cache.index.digest_tree import Described, Digested, DigestTree
from icejax.cache.index.page_codes import PageCodes
from icejax.cache.sizes import CacheSpec
from icejax.ops.pages.code_attention import CodedPages
from icejax.ops.pages.digests import Digests

Update = tuple[tuple[Digests, ...], CodedPages]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedIndex(Digested):
    """The digests of all pages, and the codes of their keys and values.

    Attributes:
        codes: codes of the keys and values of all pages; None in a `flush_slice`.
    """

    codes: CodedPages | None


@dataclass(frozen=True)
class CodedTree(DigestTree):
    """Builds and updates a `CodedIndex`.

    Attributes:
        page_codes: builds and updates the codes.
    """

    page_codes: PageCodes

    def empty(self, spec: CacheSpec, pages: int) -> CodedIndex:
        return CodedIndex(**vars(super().empty(spec, pages)), codes=self.page_codes.empty(spec, pages))

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Described:
        return *super().describe(k, v, mask), self.page_codes.describe(k, v, mask)

    def of_prompt(self, index: CodedIndex, described: Described) -> CodedIndex:
        codes = put_pages(index.codes, described[2], jnp.int32(0))
        return replace(super().of_prompt(index, described), codes=codes)

    def flush_slice(self, index: CodedIndex, page: Int[Array, ""]) -> CodedIndex:
        return replace(super().flush_slice(index, page), codes=self.page_codes.flush_slice(index.codes, page))

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
