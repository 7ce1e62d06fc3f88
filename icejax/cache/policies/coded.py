"""The clustered cache with codes of all tokens on the device, which fetches only the best tokens (`--cache coded`).

Keys and values are decoded to [B, K, M, p, H] for the M pages that the digests select.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from icejax.cache.bases.digest_pages import DigestPages
from icejax.cache.bases.reranking import at
from icejax.cache.bases.selection import Selection
from icejax.cache.index.coded_digest_tree import CodedIndex, CodedTree
from icejax.cache.index.page_codes import PageCodes
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import one_of
from icejax.ops.pages.code_attention import attend_codes
from icejax.ops.pages.digests import Score
from icejax.ops.pages.key_codes import BITS

OVERSAMPLING = 4  # pages ranked per page that `clustered` fetches; with 2 the error was larger (bench/results/pages.md)


@dataclass(frozen=True)
class Coded(DigestPages):
    """The clustered cache with a second look: tokens are ranked before they are fetched.

    Digests select four times the pages that the clustered cache would fetch. The device keeps keys and values of all tokens in
    a few bits per channel, and these codes rank the tokens of the selected pages one by one. Only the keys and values of the
    best tokens cross the bus: 192 tokens instead of 896 at a budget of 256. The other tokens of these pages count with their
    coded keys and values.

    Attributes:
        candidates: a quarter of the pages ranked for every page of tokens attended exactly. None: 4, and never fewer pages
            than at a budget of 256.
        codes: bits of a channel of a key or value: 1, 2, 3, 4 or 8. With their offsets and steps they take 13, 19, 25, 32 or
            57% of the bytes that keys and values of 16 bits take, for pages of 16 tokens and heads of 64 channels. With 1 bit
            the error was up to 2.7 times the clustered cache's.
        singly: whether single tokens are fetched, not on TPU; else the pages with the best tokens, as many as fit the budget.
        score: how a page's digest is scored; `mean` uses only the mean of all keys.
        resident: whether the fetched tokens stay on the device for the next step, which fetches only the others.

    Raises:
        InputError: an option is out of range, or leaves nothing to be ranked.
    """

    codes: int = 4
    singly: bool = True
    score: Score = "second-order"
    resident: bool = False
    by_head = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("codes", self.codes, BITS)

    @property
    def by_slot(self) -> bool:
        return self.singly

    @property
    def index(self) -> CodedTree:
        tree = super().index
        return CodedTree(tree.dtype, tree.value_fit, PageCodes(self.page_size, self.codes))

    def num_ranked(self, pages: int) -> int:
        return self.pages_for(self.budget, pages, times=OVERSAMPLING)

    def find(self, heads: Heads, index: CodedIndex, view: View) -> Selection:
        num_pages, p = index.levels[0].count.shape[-1], self.page_size
        pages = self.walk_pages(heads, index, view, self.num_ranked(num_pages))
        tokens = attend_codes(
            heads.by_group(),
            replace(at(index.codes, pages.ids), count=pages.counts),
            pages.tail,
            scoring=heads.scoring,
            page_size=p,
            bits=self.codes,
            wanted=self.num_fetched(num_pages),
            guess=self.guess(heads, view),
            whole=not self.singly,
        )
        page, slot = jnp.divmod(tokens.ids, p if self.singly else 1)
        page = jnp.take_along_axis(pages.ids, page, axis=2, mode="promise_in_bounds")
        return Selection(page * p + slot if self.singly else page, tokens.counts, tail=tokens.rest)
