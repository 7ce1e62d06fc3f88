"""The clustered cache: pages of tokens with similar keys in host memory, fetched when a query needs them (arXiv 2604.10539).

The default policy (`--cache clustered`), and with other options IceCache's own page selection (`--cache icecache`). Pages are
[B, K, M, p, H] once fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.cache.bases.digest_pages import DigestPages
from icejax.cache.bases.reranking import KEY_ONLY_FACTOR, attend_best, attend_keys_first
from icejax.cache.bases.retrieval import Near, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import ScaledState
from icejax.cache.bases.two_precisions import BITS, tokens_by_codes
from icejax.cache.index.digest_tree import Digested
from icejax.cache.pool.page_format import PagePlanes, PagesWithCodes, Stored
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Report, View
from icejax.cache.sizes import CacheSpec, PoolSpec, StepReads, num_bytes
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.pages import tree
from icejax.ops.pages.code_bytes import PageBytes
from icejax.ops.pages.digests import Score

MORE = 1.05  # bytes of a step that looks in codes, as a multiple of those of a step that looks exactly


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
        look: bits in which the tokens of the selected pages are looked at: 2, 3, 4 or 8. Their keys and values come in codes,
            which host memory holds beside the pages; then keys and values of the best tokens come exactly. None: pages are
            looked at exactly.
        looked: pages looked at in codes; None: as many as bring, with the exact tokens, at most 1.05 times the bytes of a step
            that looks exactly.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    rerank: bool = True
    tail: bool = True
    keys_first: bool | None = None
    score: Score = "second-order"
    resident: bool = False
    reuse: int = 1
    look: int | None = None
    looked: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("keys_first", self.keys_first, (None, True, False))
        one_of("look", self.look, (None, *BITS))
        needed = dict(rerank=True, tail=True, resident=False, page_dtype=None)
        if self.keys_first:
            self._check_needs("keys_first=true", "keys_first", needed | dict(look=None))
        if self.look is not None:
            self._check_needs(f"look={self.look}", "look", needed)
        if self.looked is not None:
            integer("looked", self.looked, most=2**20)
            if self.look is None:
                raise InputError(f"looked={self.looked} needs look, the bits of the codes: set look=4, or leave looked out")
            if self.looked < self._fewest_looked:
                raise InputError(
                    f"looked must be at least {self._fewest_looked}, whose tokens fill the budget, got {self.looked}"
                )

    def _check_needs(self, option: str, name: str, needed: dict[str, bool | None]) -> None:
        """Raises InputError if another option is not as `option`, whose name is `name`, needs it."""
        for other, value in needed.items():
            if getattr(self, other) != value:
                got = quoted(getattr(self, other))
                raise InputError(f"{option} needs {other}={str(value).lower()}, got {got}: leave {name} out")

    def for_platform(self, platform: str, *, latent: bool) -> Clustered:
        if self.keys_first and latent:
            raise InputError(
                "keys_first=true is not possible in latent layers, whose keys hold the values: leave keys_first out"
            )
        if self.look and platform == "tpu":
            raise InputError(f"look={self.look} is not possible on TPU, which cannot fetch single tokens: leave look out")
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
    def by_slot(self) -> bool:
        return bool(self.keys_first or self.look)

    def pool(self, spec: CacheSpec) -> PoolSpec:
        pool = super().pool(spec)
        return replace(pool, codes=self._codes(spec.planes).count) if self.look else pool

    def reads(self, spec: CacheSpec) -> StepReads:
        """Counts of the tree the highest level and the opened nodes below; a step that looks in codes as one without."""
        pages, reads = self.pool(spec).pages, super().reads(spec)
        *lower, highest = jax.eval_shape(lambda: self.index.empty(spec, pages)).levels
        opened = tree.num_opened(self.num_ranked(pages), least=self.opened) * tree.FAN_OUT
        device = num_bytes(highest) + sum(num_bytes(x) * min(opened, n := x.count.shape[-1]) // n for x in lower)
        keys_alone = self.pages_for(self.budget, pages, times=KEY_ONLY_FACTOR) * self.page_size
        halves = (keys_alone + self.num_fetched(pages)) * spec.token_bytes // 2  # keys, and values of the best
        return StepReads(device=device, host=halves if self.by_slot else reads.host)

    def stored(self, planes: PagePlanes, mask: Bool[Array, "B K P p"]) -> Stored:
        pages = super().stored(planes, mask)
        if not self.look:
            return pages
        codes = self._codes(tuple(x.shape[-1] for x in planes)).write(planes[0], planes[1] if len(planes) > 1 else None, mask)
        return PagesWithCodes(pages, codes[..., None, None, :])

    def _codes(self, sizes: tuple[int, ...]) -> PageBytes:
        """Returns how the codes of pages lie in bytes; `sizes` are the channels of their planes."""
        return PageBytes(self.page_size, sizes, self.look)

    def num_ranked(self, pages: int) -> int:
        return self.pages_for(self.budget, pages, times=KEY_ONLY_FACTOR if self.keys_first else 1)

    def num_fetched(self, pages: int) -> int:
        if self.keys_first:
            return min(self.num_ranked(pages) * self.page_size, self.max_page_tokens(self.budget))
        if self.look:
            return super().num_fetched(pages)
        return self.num_ranked(pages) if self.rerank else super().num_fetched(pages)

    def find(self, heads: Heads, index: Digested, view: View) -> Selection:
        pages = index.levels[0].count.shape[-1]
        if self.look:
            return self.walk_pages(heads, index, view, self.num_looked(pages, view.pool.pool))
        return self.walk_pages(heads, index, view, self.num_ranked(pages) if self.rerank else self.num_fetched(pages))

    def num_looked(self, pages: int, pool: PagesWithCodes) -> int:
        """Returns how many of `pages` pages of a pool, of arrays or shapes alone, a step looks at in codes."""
        if self.looked is not None:
            return min(pages, self.looked)
        planes, _, width = pool.pages.shape[-3:]
        vector, exact = width * pool.pages.dtype.itemsize, self.num_fetched(2**20)
        # A step that looks exactly fetches the keys of twice as many pages as whole ones, and values of the exact tokens.
        today = self.pages_for(self.budget, 2**20) * self.page_size * planes * vector + exact * (planes - 1) * vector
        room = int(MORE * today) - exact * planes * vector
        return min(pages, max(self._fewest_looked, room // pool.codes.shape[-1]))

    @property
    def _fewest_looked(self) -> int:
        """How many pages have the tokens that are attended exactly."""
        return -(-self.num_fetched(2**20) // self.page_size)

    def fetch_and_attend(
        self, state: ScaledState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, ScaledState]:
        if self.look:
            return self._look(state, heads, near, found, view)
        if not self.keys_first:
            return super().fetch_and_attend(state, heads, near, found, view)
        digests = state.index.levels[0]
        max_tokens = self.num_fetched(digests.count.shape[-1])
        attended, found, weights, fetched = attend_keys_first(
            heads, near, digests, found, view.pool, budget=self.budget, page_size=self.page_size, most=max_tokens
        )
        return attended, found, replace(state, weights=weights.reshape(state.weights.shape), fetched=fetched)

    def _look(
        self, state: ScaledState, heads: Heads, near: Near, selected: Selection, view: View
    ) -> tuple[Attended, Selection, ScaledState]:
        """Fetches the codes of the selected pages, and then keys and values of their best tokens."""
        ids, p, pool = selected.ids, self.page_size, view.pool
        with jax.named_scope("fetch"):
            (codes,), fetched_pages = pool.codes.fetch_live(ids, selected.counts > 0)
        with jax.named_scope("attend"):
            sizes = (heads.k.shape[-1], heads.v.shape[-1])[: pool.pages.shape[-3]]
            pages = self._codes(sizes).read(codes[..., 0, :], selected.counts)
            wanted = self.num_fetched(self.index.counts(state.index).shape[-1])
            tokens = tokens_by_codes(heads, near, pages, selected.tail, page_size=p, bits=self.look, wanted=wanted)
            slots = jnp.take_along_axis(ids, tokens.ids // p, axis=2, mode="promise_in_bounds") * p + tokens.ids % p
        best = replace(selected, ids=slots, counts=tokens.counts, tail=tokens.rest)
        attended, best, state = super().fetch_and_attend(state, heads, near, best, view)
        slot = pool.pages.shape[-3] * pool.pages.shape[-1] * pool.pages.dtype.itemsize
        fetched = state.fetched - (-fetched_pages * codes.shape[-1] // slot)  # codes count as so many slots, rounded up
        return attended, best, replace(state, fetched=fetched)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        if not self.rerank or self.look:
            return super().attend(heads, near, pages, found)
        max_tokens = self.max_page_tokens(self.budget)
        return attend_best(heads, near, pages, found, self.budget, most=max_tokens, tail=self.tail)[:2]

    def report(self, state: ScaledState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        if not (self.keys_first or self.look):
            return report
        return replace(report, pages=report.pages.at[2].set(state.fetched))  # all that was fetched was needed


class ClusteredFollower(Clustered):
    """A layer that takes the order of tokens in pages, and the selected pages, from the clustered layer before it."""

    follows = True
