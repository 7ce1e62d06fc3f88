"""The clustered cache: pages of tokens with similar keys, in host memory, fetched by need (arXiv 2604.10539)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Array, Float

from icejax.cache.bases.digest_pages import DigestPages, ScaledState
from icejax.cache.bases.reranking import TWICE, attend_best, attend_keys_first
from icejax.cache.bases.retrieval import Near, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.index.digest_tree import Digested
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Report, View
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.digests import Score


@dataclass(frozen=True)
class Clustered(DigestPages):
    """IceCache's budgeted cache, with a second-order page score that knows a page's outlier, a digest tree and a tail.

    A step attends exactly to the sinks, to the best tokens of the pages of highest score, and to the window; never to more
    than `budget` tokens per KV head and layer. All others contribute by means, and by what keys tell of values.

    Attributes:
        rerank: whether of all tokens of the pages fetched the best are attended exactly, so that there can be more pages than
            the budget holds; IceCache attends to whole pages.
        tail: whether tokens not attended exactly contribute the mean value of their page or node; IceCache's do not.
        keys_first: whether the keys of twice as many pages are fetched, and then the values of their best tokens alone: not of
            pages of int8, nor `resident`, nor of latent layers, nor on TPU, whose host memory is read in tiles of several
            rows. None: wherever that can be.
        score: how a page is scored by its digest; `mean` is by the mean of all its keys alone.
        resident: whether the pages of the newest step stay on the device, so that only others are fetched; their memory
            is that of the fetched pages.
        reuse: clustered layers that share pages: the first of so many packs and selects by its own keys and queries, the
            others follow it. IceCache(reuse) has 3.

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
                raise InputError(f"keys_first=true needs {name}={str(needed).lower()}, got {got}: leave it out")

    def for_platform(self, platform: str, *, latent: bool) -> Clustered:
        if self.keys_first and latent:
            raise InputError("keys_first=true needs values apart from keys, which latent layers have not: leave it out")
        if self.keys_first is not None:
            return self
        able = self.rerank and self.tail and not (self.resident or self.page_dtype or latent or platform == "tpu")
        return replace(self, keys_first=able)

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
        return self.pages_for(self.budget, pages, times=TWICE if self.keys_first else 1)

    def num_fetched(self, pages: int) -> int:
        if self.keys_first:
            return min(self.num_ranked(pages) * self.page_size, self.most_exact(self.budget))
        return self.num_ranked(pages) if self.rerank else super().num_fetched(pages)

    def find(self, heads: Heads, index: Digested, view: View) -> Selection:
        pages = index.levels[0].count.shape[-1]
        return self.walked(heads, index, view, self.num_ranked(pages) if self.rerank else self.num_fetched(pages))

    def fetch_and_attend(
        self, state: ScaledState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, ScaledState]:
        if not self.keys_first:
            return super().fetch_and_attend(state, heads, near, found, view)
        digests = state.index.levels[0]
        most = self.num_fetched(digests.count.shape[-1])
        attended, found, weights, fetched = attend_keys_first(
            heads, near, digests, found, view.pool, budget=self.budget, page_size=self.page_size, most=most
        )
        return attended, found, replace(state, weights=weights.reshape(state.weights.shape), fetched=fetched)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        if not self.rerank:
            return super().attend(heads, near, pages, found)
        most = self.most_exact(self.budget)
        return attend_best(heads, near, pages, found, self.budget, most=most, tail=self.tail)[:2]

    def report(self, state: ScaledState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        if not self.keys_first:
            return report
        return replace(report, pages=report.pages.at[2].set(state.fetched))  # all that came was needed


class ClusteredFollower(Clustered):
    """A layer that takes partition and pages of the clustered layer before it."""

    follows = True
