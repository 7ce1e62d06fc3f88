"""Base of the clustered caches: pages of tokens with similar keys, selected by a tree of digests (IceCache, arXiv 2604.10539).

`Clustered`, `Coded` and `Tolerant` build on it. Digests are [B, K, P, ...] on the device, pages [P, B, K, planes, p, W].
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.channel_scaling import scaled
from icejax.cache.bases.reranking import pages_for
from icejax.cache.bases.retrieval import PagedState, Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.window import Window
from icejax.cache.index.digest_tree import Digested, DigestTree
from icejax.cache.protocol import Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError, quoted
from icejax.checks.numbers import integer, one_of, power_of_two
from icejax.ops.attention.dense import Attended
from icejax.ops.pages import tree
from icejax.ops.pages.channel_scaling import factors_of
from icejax.ops.pages.digests import NARROW, Score
from icejax.ops.pages.packing import pack
from icejax.ops.pages.tree_walk import PageGroup, WalkRules, walk

RANGES = dict(
    budget=(1, 2**30), page_size=(4, 128), sinks=(0, 2**20), window=(1, 2**20), candidates=(1, 2**20), opened=(1, 2**20),
    compact_every=(0, 2**20), dense_layers=(0, 1024), reuse=(1, 1024),
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledState(PagedState):
    """The device state of a layer.

    Attributes:
        factors: powers of two by which the channels of keys are multiplied, set by a row's first text; None: no scaling.
    """

    factors: jax.Array | None  # f32[B, K, H]


@dataclass(frozen=True)
class DigestPages(Retrieval):
    """Pages of tokens with similar keys, a digest of every page on the device, and a walk over the digests that selects pages.

    Attributes:
        budget: tokens attended exactly per KV head and layer, sinks and window included.
        page_size: tokens of a page.
        sinks: first tokens kept on the device; None: an eighth of the budget, at most 32 (the paper's two pages).
        window: newest tokens kept on the device; None: an eighth of the budget and a page, at most two pages.
        candidates: pages fetched for every page of tokens attended exactly; the best of their tokens are attended to. None: 4,
            and never fewer pages than at a budget of 256.
        value_fit: whether keys predict the values of tokens that are not attended exactly, by one matrix per KV head fitted to
            the text; not with the score `mean`, nor where the matrix takes more than a quarter of the digests' bytes. In latent
            layers keys hold the values, so that no matrix is fitted.
        balance: whether channels whose keys are far larger or smaller than their queries are scaled to like size: attention
            stays the same, distances between keys change; not in latent layers, whose keys hold the values.
        group: how the query heads of a KV head agree on pages: sum or max of their softmax weights, or interleave, the best
            pages of each head in turn (IceCache's rule).
        digest_dtype: `int8` or `float8_e4m3fn`, with a scale per vector; None: the model's.
        page_dtype: `int8` stores pages with a scale per page and channel, in 56% of a 16-bit model's host memory (not on TPU);
            None: the model's.
        opened: nodes of the digest tree opened per level; more if their pages are fewer than twice the pages ranked.
        compact_every: decoded tokens after which their pages are packed again, by meaning; 0: never.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more (as in the
            paper), else 0.
        prefetch: whether pages are selected by queries guessed from the input of the layer before, while that layer runs
            (IceCache's).

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    budget: int = 256
    page_size: int = 16
    sinks: int | None = None
    window: int | None = None
    candidates: int | None = None
    value_fit: bool = True
    balance: bool = True
    group: PageGroup = "sum"
    digest_dtype: str | None = None
    page_dtype: str | None = None
    opened: int = 88
    compact_every: int = 1024
    dense_layers: int | None = None
    prefetch: bool = False

    score = "second-order"  # how a page's digest is scored
    tail = True  # whether tokens not attended exactly count by the digest of their page or node

    def __post_init__(self) -> None:
        for name, default in ((field.name, field.default) for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if name in RANGES and not (value is None and default is None):
                integer(name, value, least=RANGES[name][0], most=RANGES[name][1])
            if isinstance(default, bool) and not isinstance(value, bool):
                raise InputError(f"{name} must be true or false, got {quoted(value)}")
        one_of("score", self.score, typing.get_args(Score))
        one_of("group", self.group, typing.get_args(PageGroup))
        one_of("digest_dtype", self.digest_dtype, (None, *NARROW))
        one_of("page_dtype", self.page_dtype, (None, "int8"))
        power_of_two("page_size", self.page_size)
        power_of_two("compact_every", self.compact_every, least=0)
        if 0 < self.compact_every < 2 * self.page_size:
            raise InputError(f"compact_every must be 0 or at least two pages ({2 * self.page_size}), got {self.compact_every}")
        if self.window is not None and self.window <= self.page_size:
            raise InputError(f"window must be larger than page_size ({self.page_size}), got {self.window}")
        least = max(8, (self.sinks or 0) + (self.window or 0) + self.page_size)
        while sum(self._sinks_and_window(least)) + self.page_size > least:
            least += 1
        if self.budget < least:
            sinks, window = self._sinks_and_window(least)
            raise InputError(
                f"budget must hold {sinks} sinks, a window of {window} and a page of {self.page_size}: "
                f"at least {least}, got {self.budget}"
            )

    def _sinks_and_window(self, budget: int) -> tuple[int, int]:
        """Returns the number of sinks and of window slots for a budget."""
        sinks = min(32, budget // 8) if self.sinks is None else self.sinks
        return sinks, min(2 * self.page_size, budget // 8 + self.page_size) if self.window is None else self.window

    @property
    def window_layout(self) -> Window:
        return Window(*self._sinks_and_window(self.budget), self.page_size)

    @property
    def index(self) -> DigestTree:
        return DigestTree(self.digest_dtype, self.value_fit and self.tail and self.score == "second-order")

    def order(self, k: Float[Array, "B K T H"], valid: Bool[Array, "B T"]) -> Int[Array, "B K T"]:
        return pack(k, valid, page_size=self.page_size)

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

    def walk_pages(self, heads: Heads, index: Digested, view: View, fetched: int) -> Selection:
        """Returns the best `fetched` pages, best first, by a walk that opens nodes for at least `num_ranked` pages."""
        num_candidates = max(fetched, self.num_ranked(index.levels[0].count.shape[-1]))
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
        return Selection(result.page_ids, result.counts, None, tail, result.tail_uneven, from_keys, result.path)

    def guess(self, heads: Heads, view: View) -> Float[Array, "B K G H"] | None:
        """Returns the guessed queries to select pages by; None: the layer's own queries select."""
        return view.guess().reshape(heads.by_group().shape) if self.prefetch and view.guess is not None else None

    def init(self, spec: CacheSpec) -> ScaledState:
        ones = jnp.ones((spec.batch_size, spec.num_kv_heads, spec.head_dim))
        factors = ones if self.balance and not spec.latent else None
        return ScaledState(**vars(super().init(spec)), factors=factors)

    def prefill(self, state: ScaledState, heads: Heads, attended: Attended, view: View) -> Outcome:
        if state.factors is not None:
            state = replace(state, factors=factors_of(heads.q, heads.k, heads.lengths))
        return super().prefill(state, scaled(heads, state.factors), attended, view)

    def decode(self, state: ScaledState, heads: Heads, view: View) -> Outcome:
        if view.guess is not None:
            view = replace(view, guess=lambda guess=view.guess: scaled(replace(heads, q=guess()), state.factors).q)
        return super().decode(state, scaled(heads, state.factors), view)

    def extend(self, state: ScaledState, heads: Heads, view: View) -> Outcome:
        return super().extend(state, scaled(heads, state.factors), view)

    def report(self, state: ScaledState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        return replace(report, digest_bytes=report.digest_bytes + sum(x.nbytes for x in jax.tree.leaves(state.factors)))
