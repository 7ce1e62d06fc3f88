"""The clustered cache that ranks tokens on the device by codes of their keys, and fetches only the best (`--cache coded`).

Codes are 1, 2 or 4 bits per channel of a key; keys are decoded to [B, K, M, p, H] for the pages that the digests select.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.digest_pages import DigestPages
from icejax.cache.bases.reranking import at, attend_best
from icejax.cache.bases.retrieval import Near, Pages, Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.index.coded_digest_tree import CodedIndex, CodedTree
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.pages import key_codes
from icejax.ops.pages.code_reranking import rerank_by_codes
from icejax.ops.pages.digests import Score
from icejax.ops.slots import merge_heads

OVERSAMPLING = 4  # pages ranked per page that `clustered` fetches; with 2 the error was larger (bench/results/pages.md)


@dataclass(frozen=True)
class Coded(DigestPages):
    """The clustered cache with a second look: tokens are ranked before they are fetched.

    Digests select four times the pages that the clustered cache would fetch. Their tokens are ranked one by one by a few bits
    per channel of their keys, which the device keeps. Only the keys and values of the best tokens cross the bus: 192 tokens
    instead of 896 at a budget of 256. The other tokens of these pages get their weights from their codes, and count with their
    page's mean value, corrected by what keys predict.

    Attributes:
        candidates: a quarter of the pages ranked for every page of tokens attended exactly; with `singly=false` this many are
            fetched. None: 4, and never fewer pages than at a budget of 256.
        codes: bits of a channel: 1, 2 or 4. With the least and the step of each page and channel they take 9, 13 or 19% of
            the bytes that keys and values of 16 bits take in host memory, for pages of 16 and keys and values of one size.
        singly: whether single tokens are fetched, not on TPU; else the pages with the best tokens, as many as the clustered
            cache fetches, whose tokens are ranked again by their keys.
        score: how a page's digest is scored; `mean` uses only the mean of all keys.
        resident: whether the fetched tokens stay on the device for the next step, which fetches only the others.

    Raises:
        InputError: an option is out of range, or leaves nothing to be ranked.
    """

    codes: int = 4
    singly: bool = True
    score: Score = "second-order"
    resident: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("codes", self.codes, key_codes.BITS)

    @property
    def by_slot(self) -> bool:
        return self.singly

    @property
    def index(self) -> CodedTree:
        tree = super().index
        return CodedTree(tree.dtype, tree.value_fit, self.page_size, self.codes)

    def num_fetched(self, pages: int) -> int:
        return Retrieval.num_fetched(self, pages) if self.singly else self.pages_for(self.budget, pages)

    def num_ranked(self, pages: int) -> int:
        return self.pages_for(self.budget, pages, times=OVERSAMPLING)

    def find(self, heads: Heads, index: CodedIndex, view: View) -> Selection:
        selection = self.walk_pages(heads, index, view, self.num_ranked(index.levels[0].count.shape[-1]))
        ids, p = selection.ids, self.page_size
        pages = replace(at(index.levels[0], ids), count=selection.counts)
        keys = key_codes.decode_keys(at(index.codes, ids), p, self.codes)
        guess = self.guess(heads, view)
        reranked = rerank_by_codes(
            merge_heads(heads.by_group()),
            merge_heads(keys),
            jax.tree.map(merge_heads, pages),
            Attended(*map(merge_heads, selection.tail)),
            jax.tree.map(merge_heads, selection.from_keys),
            scoring=heads.scoring,
            wanted=self.num_fetched(index.levels[0].count.shape[-1]),
            whole=not self.singly,
            guess=None if guess is None else merge_heads(guess),
        )
        best, counts, tail = jax.tree.map(lambda x: x.reshape(*ids.shape[:2], *x.shape[1:]), reranked)
        page = jnp.take_along_axis(ids, best // p if self.singly else best, axis=2, mode="promise_in_bounds")
        return Selection(page * p + best % p if self.singly else page, counts, None, tail, from_keys=selection.from_keys)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        if self.singly:
            return super().attend(heads, near, pages, found)
        max_tokens = self.max_page_tokens(self.budget)
        return attend_best(heads, near, pages, found, self.budget, most=max_tokens, tail=True)[:2]
