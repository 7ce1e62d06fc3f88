"""The clustered cache: pages of tokens with similar keys in host memory, fetched when a query needs them (arXiv 2604.10539).

The default policy (`--cache clustered`), and with other options IceCache's own page selection (`--cache icecache`). Pages are
[B, K, M, p, H] once fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jaxtyping import Array, Float

from icejax.cache.bases.looked_pages import LookedPages
from icejax.cache.bases.page_reads import KeysFirst, WholePages
from icejax.cache.bases.reranking import KEY_ONLY_FACTOR
from icejax.cache.bases.retrieval import Near, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import ScaledState
from icejax.cache.index.digest_tree import Digested
from icejax.cache.protocol import CachePolicy, Heads, View
from icejax.cache.sizes import CacheSpec, StepReads, num_bytes
from icejax.checks.errors import InputError
from icejax.checks.numbers import one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.pages import tree
from icejax.ops.pages.digests import Score


@dataclass(frozen=True)
class Clustered(LookedPages):
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
    by_head = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("keys_first", self.keys_first, (None, True, False))
        needed = dict(rerank=True, tail=True, resident=False)
        if self.keys_first:
            self._check_needs("keys_first=true", "keys_first", needed | dict(page_dtype=None, look=None))
        if self.look is not None:
            self._check_needs(f"look={self.look}", "look", needed)

    def for_platform(self, platform: str, *, latent: bool) -> Clustered:
        if self.keys_first and latent:
            raise InputError(
                "keys_first=true is not possible in latent layers, whose keys hold the values: leave keys_first out"
            )
        super().for_platform(platform, latent=latent)
        if self.keys_first is not None:
            return self
        exactly_first = self.rerank and self.tail and not (self.look or self.resident or self.page_dtype)
        keys_first = exactly_first and not (latent or platform == "tpu")
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
    def reads(self) -> WholePages:
        """How a step reads pages."""
        if self.look:
            return self.in_codes
        return KeysFirst(self) if self.keys_first else WholePages(self, self.rerank)

    @property
    def by_slot(self) -> bool:
        return self.reads.by_slot

    def step_reads(self, spec: CacheSpec) -> StepReads:
        """Counts of the tree the highest level and the opened nodes below; a step that looks in codes as one without."""
        pages, reads = self.pool(spec).pages, super().step_reads(spec)
        *lower, highest = jax.eval_shape(lambda: self.index.empty(spec, pages)).levels
        opened = tree.num_opened(self.num_ranked(pages), least=self.opened) * tree.FAN_OUT
        device = num_bytes(highest) + sum(num_bytes(x) * min(opened, n := x.count.shape[-1]) // n for x in lower)
        keys_alone = self.pages_for(self.budget, pages, times=KEY_ONLY_FACTOR) * self.page_size
        halves = (keys_alone + self.num_fetched(pages)) * spec.token_bytes // 2  # keys, and values of the best
        return StepReads(device=device, host=halves if self.by_slot else reads.host)

    def num_ranked(self, pages: int) -> int:
        return self.reads.num_ranked(pages)

    def num_fetched(self, pages: int) -> int:
        return self.reads.num_fetched(pages)

    def find(self, heads: Heads, index: Digested, view: View) -> Selection:
        pages = index.levels[0].count.shape[-1]
        return self.walk_pages(heads, index, view, self.reads.num_selected(pages, view.pool.pool))

    def fetch_and_attend(
        self, state: ScaledState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, ScaledState]:
        return self.reads.fetch_and_attend(state, heads, near, found, view)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        return self.reads.attend(heads, near, pages, found)


class ClusteredFollower(Clustered):
    """A layer that takes the order of tokens in pages, and the selected pages, from the clustered layer before it."""

    follows = True
