"""All tokens in codes of a few bits on the device, and the best of them exactly from the host (`--cache packed`).

A full cache in 4 bits, with host memory behind it for the tokens that a query weighs most. Slots of pages are i32[B, K, M].
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float

from icejax.cache.bases.retrieval import Near, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import SimilarPages
from icejax.cache.bases.two_precisions import BITS, attend_best_tokens, tokens_by_codes
from icejax.cache.index.page_codes import PageCodes
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.code_attention import CodedPages


@dataclass(frozen=True)
class Packed(SimilarPages):
    """Keys and values of all tokens in 4 bits on the device, and the best tokens exactly from host memory.

    Tokens of a page have similar keys, so that each channel of a page has a small range, which 4 bits with an offset and a step
    divide finely. A step weighs all tokens by their coded keys, and fetches keys and values of the best ones: 192 at a budget
    of 256. All other tokens count with their coded keys and values. There are no digests.

    Values have an offset and a step per page and channel, as keys have: with 192 exact tokens this left 0.46 to 0.85 times the
    error of values coded by token, on four models.

    Attributes:
        codes: bits of a channel of a key or value: 2, 3, 4 or 8. With their offsets and steps they take 19, 25, 32 or 57% of
            the bytes of a full cache of 16 bits, for pages of 16 tokens and heads of 64 channels.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    codes: int = 4

    by_slot = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("codes", self.codes, BITS)

    @property
    def index(self) -> PageCodes:
        return PageCodes(self.page_size, self.codes)

    def find(self, heads: Heads, index: CodedPages, view: View) -> Selection:
        wanted = self.num_fetched(index.count.shape[-1])
        tokens = tokens_by_codes(heads, view.near, index, page_size=self.page_size, bits=self.codes, wanted=wanted)
        return Selection(tokens.ids, tokens.counts, tail=tokens.rest)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        del near  # in the tail
        return attend_best_tokens(heads, pages, found.tail)
