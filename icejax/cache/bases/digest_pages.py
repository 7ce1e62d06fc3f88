"""Base of the clustered caches: pages of tokens with similar keys, selected by a tree of digests (IceCache, arXiv 2604.10539).

`LookedPages` and `Coded` build on it. Digests are [B, K, P, ...] on the device, pages [P, B, K, planes, p, W].
"""

from __future__ import annotations

import typing
from dataclasses import dataclass

from jaxtyping import Array, Float

from icejax.cache.bases.reranking import pages_for
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import SimilarPages
from icejax.cache.index.digest_tree import Digested, DigestTree
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.pages import tree
from icejax.ops.pages.digests import NARROW, Score
from icejax.ops.pages.tree_walk import PageGroup, WalkRules, walk


@dataclass(frozen=True)
class DigestPages(SimilarPages):
    """Pages of tokens with similar keys, a digest of every page on the device, and a walk over the digests that selects pages.

    Attributes:
        candidates: pages fetched for every page of tokens attended exactly; the best of their tokens are attended to. None: 4,
            and never fewer pages than at a budget of 256.
        value_fit: whether keys predict the values of tokens that are not attended exactly, by one matrix per KV head fitted to
            the text; not with the score `mean`, nor where the matrix takes more than a quarter of the digests' bytes. In latent
            layers keys hold the values, so that no matrix is fitted.
        group: how the query heads of a KV head agree on pages: sum or max of their softmax weights, or interleave, the best
            pages of each head in turn (IceCache's rule).
        digest_dtype: `int8` or `float8_e4m3fn`, with a scale per vector; None: the model's.
        page_dtype: `int8` stores pages with a scale per page and channel, in 56% of a 16-bit model's host memory (not on TPU);
            None: the model's.
        opened: nodes of the digest tree opened per level; more if their pages are fewer than twice the pages ranked.
        prefetch: whether pages are selected by queries guessed from the input of the layer before, while that layer runs
            (IceCache's).

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    candidates: int | None = None
    value_fit: bool = True
    group: PageGroup = "sum"
    digest_dtype: str | None = None
    page_dtype: str | None = None
    opened: int = 88
    prefetch: bool = False

    score = "second-order"  # how a page's digest is scored
    tail = True  # whether tokens not attended exactly count by the digest of their page or node

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("score", self.score, typing.get_args(Score))
        one_of("group", self.group, typing.get_args(PageGroup))
        one_of("digest_dtype", self.digest_dtype, (None, *NARROW))
        one_of("page_dtype", self.page_dtype, (None, "int8"))

    @property
    def index(self) -> DigestTree:
        return DigestTree(self.digest_dtype, self.value_fit and self.tail and self.score == "second-order")

    def max_page_tokens(self, budget: int) -> int:
        """Returns the largest number of page tokens attended exactly: no sink is filled, and the window is at its smallest."""
        return budget - self.window_layout.fill - 1

    def pages_for(self, budget: int, pages: int, *, times: int = 1) -> int:
        """Returns how many of `pages` pages are ranked for a budget, `times` as many if they exist.

        With the defaults (32 sinks, a window of 17 to 32 tokens, pages of 16):

            exact page tokens    256 - 17 = 239 at most, 207 if the sinks are filled
            their pages          13, and one more
            ranked pages         56, by `reranking.pages_for(14, 16, None)`; 112 for times=2
        """
        wanted = -(-(self.max_page_tokens(budget) - self.window_layout.sinks) // self.page_size) + 1
        return min(pages, times * pages_for(wanted, self.page_size, self.candidates))

    def num_ranked(self, pages: int) -> int:
        """Returns how many of `pages` pages have their tokens ranked."""
        return self.pages_for(self.budget, pages)

    def walk_pages(self, heads: Heads, index: Digested, view: View, fetched: int, *, among: int = 0) -> Selection:
        """Returns the best `fetched` pages, best first; the walk opens nodes for at least `num_ranked` and `among` pages."""
        num_candidates = max(fetched, among, self.num_ranked(index.levels[0].count.shape[-1]))
        from_keys = self.index.from_keys(index)
        result = walk(
            heads.by_group(),
            index.levels,
            index.scatter,
            scoring=heads.scoring,
            rules=WalkRules(
                opened=tree.num_opened(num_candidates, least=self.opened),
                selected=fetched,
                tail=self.tail,
                score=self.score,
                group=self.group,
            ),
            guess=self.guess(heads, view),
            path=view.shared.choice if self.follows else None,
            from_keys=from_keys,
        )
        tail = Attended(result.tail_out[..., : heads.v.shape[-1]], result.tail_lse)  # a latent layer's tail has whole keys
        return Selection(result.page_ids, result.counts, None, tail, result.tail_uneven, from_keys, choice=result.path)

    def guess(self, heads: Heads, view: View) -> Float[Array, "B K G H"] | None:
        """Returns the guessed queries to select pages by; None: the layer's own queries select."""
        return view.guess().reshape(heads.by_group().shape) if self.prefetch and view.guess is not None else None
