"""The clustered cache: pages of tokens with similar keys in host memory, fetched when a query needs them (arXiv 2604.10539).

The default policy (`--cache clustered`), and with other options IceCache's own page selection (`--cache icecache`). Pages are
[B, K, M, p, H] once fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Array, Float

from icejax.cache.bases.digest_pages import DigestPages
from icejax.cache.bases.reranking import KEY_ONLY_FACTOR, attend_best, attend_keys_first
from icejax.cache.bases.retrieval import Near, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import ScaledState
from icejax.cache.index.digest_tree import Digested
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Report, View
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.digests import Score


@dataclass(frozen=True)
class Clustered(DigestPages):
    """IceCache's cache with a budget, extended by a second-order page score with outliers, a digest tree and a tail.

    A step attends exactly to the sinks, the window and the best tokens of the pages of highest score: at most `budget` tokens
    per KV head and layer. All other tokens contribute mean values, corrected by what keys predict of values.

    Attributes:
        rerank: whether the best tokens of all fetched pages are attended exactly, so that more pages can be fetched than the
            budget holds; else whole pages are attended to, as in IceCache.
        tail: whether tokens not attended exactly contribute the mean value of their page or node; not in IceCache.
        keys_first: whether the keys of twice as many pages are fetched, and then the values of their best tokens alone; not
            with int8 pages, `resident` or latent layers, nor on TPU, whose host memory is read in tiles of several rows. None:
            wherever possible.
        score: how a page's digest is scored; `mean` uses only the mean of all keys.
        resident: whether the fetched pages stay on the device for the next step, which fetches only the others; takes device
            memory for one step's pages.
        reuse: clustered layers that share pages: the first layer of each run packs and selects by its own keys and queries,
            the others follow it; 3 in IceCache's reuse.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    rerank: bool = True
    tail: bool = True
    keys_first: bool | None = None
    score: Score = "second-order"
    resident: bool = False
    reuse: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("keys_first", self.keys_first, (None, True, False))
        for name, needed in dict(rerank=True, tail=True, resident=False, page_dtype=None).items() if self.keys_first else ():
            if getattr(self, name) != needed:
                got = quoted(getattr(self, name))
                raise InputError(f"keys_first=true needs {name}={str(needed).lower()}, got {got}: leave keys_first out")

    def for_platform(self, platform: str, *, latent: bool) -> Clustered:
        if self.keys_first and latent:
            raise InputError(
                "keys_first=true is not possible in latent layers, whose keys hold the values: leave keys_first out"
            )
        if self.keys_first is not None:
            return self
        keys_first = self.rerank and self.tail and not (self.resident or self.page_dtype or latent or platform == "tpu")
        return replace(self, keys_first=keys_first)

    def for_layers(self, full: Sequence[int], *, of: int) -> list[CachePolicy]:
        if self.reuse == 1:
            return [self] * len(full)
        follower = ClusteredFollower(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        return [follower if rank % self.reuse else self for rank in range(len(full))]

    @property
    def shares(self) -> bool:
        return self.reuse > 1

    @property
    def by_slot(self) -> bool:
        return bool(self.keys_first)

    def num_ranked(self, pages: int) -> int:
        return self.pages_for(self.budget, pages, times=KEY_ONLY_FACTOR if self.keys_first else 1)

    def num_fetched(self, pages: int) -> int:
        if self.keys_first:
            return min(self.num_ranked(pages) * self.page_size, self.max_page_tokens(self.budget))
        return self.num_ranked(pages) if self.rerank else super().num_fetched(pages)

    def find(self, heads: Heads, index: Digested, view: View) -> Selection:
        pages = index.levels[0].count.shape[-1]
        return self.walk_pages(heads, index, view, self.num_ranked(pages) if self.rerank else self.num_fetched(pages))

    def fetch_and_attend(
        self, state: ScaledState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, ScaledState]:
        if not self.keys_first:
            return super().fetch_and_attend(state, heads, near, found, view)
        digests = state.index.levels[0]
        max_tokens = self.num_fetched(digests.count.shape[-1])
        attended, found, weights, fetched = attend_keys_first(
            heads, near, digests, found, view.pool, budget=self.budget, page_size=self.page_size, most=max_tokens
        )
        return attended, found, replace(state, weights=weights.reshape(state.weights.shape), fetched=fetched)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        if not self.rerank:
            return super().attend(heads, near, pages, found)
        max_tokens = self.max_page_tokens(self.budget)
        return attend_best(heads, near, pages, found, self.budget, most=max_tokens, tail=self.tail)[:2]

    def report(self, state: ScaledState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        if not self.keys_first:
            return report
        return replace(report, pages=report.pages.at[2].set(state.fetched))  # every fetched slot was needed


class ClusteredFollower(Clustered):
    """A layer that takes the order of tokens in pages, and the selected pages, from the clustered layer before it."""

    follows = True
