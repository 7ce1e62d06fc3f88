"""All tokens in codes of a few bits on the device, and the best of them exactly from the host (`--cache packed`).

A full cache in 4 bits, with host memory behind it for the tokens that a query weighs most. Slots of pages are i32[B, K, M].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.cache.bases.reranking import at
from icejax.cache.bases.retrieval import Near, PagedState, Pages
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import ScaledState, SimilarPages
from icejax.cache.bases.two_precisions import BITS, attend_best_tokens, error_of_codes, tokens_by_codes
from icejax.cache.index.page_codes import PageCodes
from icejax.cache.pool.attention import Read
from icejax.cache.pool.page_format import PagePlanes, Stored
from icejax.cache.protocol import Heads, Lengths, Report, View
from icejax.cache.sizes import CacheSpec, PoolSpec
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.code_attention import CodedPages, decoded_planes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedState(ScaledState):
    """The device state of a layer.

    Attributes:
        error: estimated relative error of the newest step, mean over query heads; None: not estimated.
    """

    error: jax.Array | None  # f32[B]


@dataclass(frozen=True)
class Packed(SimilarPages):
    """Keys and values of all tokens in 4 bits on the device, and the best tokens exactly from host memory.

    Tokens of a page have similar keys, so that each channel of a page has a small range, which 4 bits with an offset and a step
    divide finely. A step weighs all tokens by their coded keys, and fetches keys and values of the best ones: 192 at a budget
    of 256. All other tokens count with their coded keys and values. The policy has no digests.

    Values have an offset and a step per page and channel, as keys have: with 192 exact tokens this left 0.46 to 0.85 times the
    error of values coded by token, on four models.

    Attributes:
        codes: bits of a channel of a key or value: 2, 3, 4 or 8. With their offsets and steps they take 19, 25, 32 or 57% of
            the bytes of a full cache of 16 bits, for pages of 16 tokens and heads of 64 channels.
        exact: most tokens of pages that are attended exactly; None: as many as the budget holds besides sinks and window. With
            0 nothing is in host memory: later texts attend to codes of earlier ones too, and generated tokens are not packed
            again (`compact_every`), which would need their keys.
        estimate: whether each step estimates the relative error that codes leave in its attention, from their steps.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a page.
    """

    codes: int = 4
    exact: int | None = None
    estimate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("codes", self.codes, BITS)
        if self.exact is not None:
            integer("exact", self.exact, least=0, most=2**30)
            if self.exact > (room := super().num_fetched(2**30)):
                raise InputError(f"exact must be at most {room}, the page tokens of budget={self.budget}, got {self.exact}")

    @property
    def by_slot(self) -> bool:
        return self.exact != 0

    @property
    def by_head(self) -> bool:
        return not self.estimate  # a mean over all heads

    @property
    def index(self) -> PageCodes:
        return PageCodes(self.page_size, self.codes)

    def pool(self, spec: CacheSpec) -> PoolSpec:
        pool = super().pool(spec)
        return replace(pool, planes=0, compact_every=0) if self.exact == 0 else pool

    def stored(self, planes: PagePlanes, mask: Bool[Array, "B K P p"]) -> Stored:
        return () if self.exact == 0 else super().stored(planes, mask)

    def num_fetched(self, pages: int) -> int:
        return min(super().num_fetched(pages), pages * self.page_size if self.exact is None else self.exact)

    def find(self, heads: Heads, index: CodedPages, view: View) -> Selection:
        wanted = self.num_fetched(index.count.shape[-1])
        sizes = dict(page_size=self.page_size, bits=self.codes, wanted=wanted, estimate=self.estimate)
        tokens = tokens_by_codes(heads, view.near, index, **sizes)
        return Selection(tokens.ids, tokens.counts, tail=tokens.rest, noise=tokens.noise)

    def init(self, spec: CacheSpec) -> PackedState:
        return PackedState(**vars(super().init(spec)), error=jnp.zeros(spec.batch_size) if self.estimate else None)

    def fetch_and_attend(
        self, state: PackedState, heads: Heads, near: Near, found: Selection, view: View
    ) -> tuple[Attended, Selection, PackedState]:
        attended = found.tail
        if self.exact != 0:
            attended, found, state = super().fetch_and_attend(state, heads, near, found, view)
        if found.noise is not None:
            state = replace(state, error=error_of_codes(found.noise, attended, self.codes).mean((1, 2)))
        return attended, found, state

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        del near  # in the tail
        return attend_best_tokens(heads, pages, found.tail)

    def reader(self, state: PagedState, view: View) -> Read:
        if self.exact != 0:
            return super().reader(state, view)
        sizes = dict(page_size=self.page_size, bits=self.codes, dtype=str(state.window.newest[0].dtype))
        return lambda ids: decoded_planes(at(state.index, ids), **sizes)

    def report(self, state: PackedState, lengths: Lengths) -> Report:
        report = super().report(state, lengths)
        if state.error is None:
            return report
        return replace(report, estimates=jnp.stack([state.error, self.exact_tokens(state, lengths)]))
