"""How a step of the clustered cache reads the pages that digests select: whole, keys first, or in codes first.

Policy Clustered chooses one of these classes by its options; with `look` Tolerant too reads in codes.
Selected pages are [B, K, M], once fetched [B, K, M, p, H].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.digest_pages import DigestPages
from icejax.cache.bases.reranking import KEY_ONLY_FACTOR, attend_best, attend_keys_first
from icejax.cache.bases.retrieval import Near, Pages, Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.similar_pages import ScaledState
from icejax.cache.bases.two_precisions import attend_best_tokens, tokens_by_codes
from icejax.cache.pool.host_pool import Fetched
from icejax.cache.pool.page_format import PagePlanes, PagesWithCodes, Stored
from icejax.cache.protocol import Heads, View
from icejax.ops.attention.dense import Attended
from icejax.ops.pages.code_bytes import PageBytes

MORE = 1.05  # bytes of a step that looks in codes, as a multiple of those of a step that looks exactly
Step = tuple[Attended, Selection, ScaledState]  # what `Retrieval.fetch_and_attend` returns


@dataclass(frozen=True)
class WholePages:
    """Fetches the selected pages, and attends to all their tokens, or to the best of them.

    Attributes:
        policy: the policy whose step it is; its budget and page size are read.
        rerank: whether only the best tokens are attended exactly, so that more pages can be fetched than the budget holds.
    """

    policy: DigestPages
    rerank: bool = True

    by_slot: ClassVar[bool] = False  # whether single tokens are fetched, all of which are attended to

    def num_ranked(self, pages: int) -> int:
        """Returns how many of `pages` pages have their tokens ranked."""
        return self.policy.pages_for(self.policy.budget, pages)

    def num_fetched(self, pages: int) -> int:
        """Returns how many of `pages` pages, or of their slots (`by_slot`), are fetched."""
        return self.num_ranked(pages) if self.rerank else Retrieval.num_fetched(self.policy, pages)

    def num_selected(self, pages: int, pool: Any) -> int:
        """Returns how many of `pages` pages of a pool, of arrays or shapes alone, digests select."""
        del pool
        return self.num_fetched(pages)

    def fetch_and_attend(self, state: ScaledState, heads: Heads, near: Near, found: Selection, view: View) -> Step:
        """Returns the attention of a decoded token, the selection that it attended to, and the new state."""
        return Retrieval.fetch_and_attend(self.policy, state, heads, near, found, view)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        """Returns the attention to the fetched tokens, and their weights, as `Retrieval.attend` does."""
        if not self.rerank:
            return Retrieval.attend(self.policy, heads, near, pages, found)
        budget, tail = self.policy.budget, self.policy.tail
        return attend_best(heads, near, pages, found, budget, most=self.policy.max_page_tokens(budget), tail=tail)[:2]


@dataclass(frozen=True)
class KeysFirst(WholePages):
    """Fetches the keys of twice as many pages, and then the values of their best tokens."""

    by_slot = True

    def num_ranked(self, pages: int) -> int:
        return self.policy.pages_for(self.policy.budget, pages, times=KEY_ONLY_FACTOR)

    def num_fetched(self, pages: int) -> int:
        return min(self.num_ranked(pages) * self.policy.page_size, self.policy.max_page_tokens(self.policy.budget))

    def num_selected(self, pages: int, pool: Any) -> int:
        del pool
        return self.num_ranked(pages)

    def fetch_and_attend(self, state: ScaledState, heads: Heads, near: Near, found: Selection, view: View) -> Step:
        digests, sizes = state.index.levels[0], dict(budget=self.policy.budget, page_size=self.policy.page_size)
        most = self.num_fetched(digests.count.shape[-1])
        attended, found, weights, fetched = attend_keys_first(heads, near, digests, found, view.pool, most=most, **sizes)
        return attended, found, replace(state, weights=weights.reshape(state.weights.shape), fetched=fetched)


@dataclass(frozen=True)
class InCodes(WholePages):
    """Fetches codes of the selected pages, and then keys and values of their best tokens; all others count by their codes.

    Attributes:
        bits: bits of a code.
        looked: pages whose codes are fetched; None: as many as bring, with the exact tokens, at most 1.05 times the bytes of a
            step that fetches keys first.
    """

    bits: int = 4
    looked: int | None = None

    by_slot = True

    def num_fetched(self, pages: int) -> int:
        return self.num_exact(pages, self.policy.budget)

    def num_exact(self, pages: int, budget: int) -> int:
        """Returns how many tokens of `pages` pages a budget holds besides sinks and window."""
        layout = self.policy.window_layout
        return min(pages * self.policy.page_size, budget - layout.sinks - layout.slots)

    @property
    def fewest(self) -> int:
        """How many pages have the tokens that are attended exactly."""
        return -(-self.num_fetched(2**20) // self.policy.page_size)

    def num_selected(self, pages: int, pool: Any) -> int:
        return min(pages, self.looked) if self.looked is not None else self.num_for(self.policy.budget, pages, pool)

    def num_for(self, budget: int, pages: int, pool: Any) -> int:
        """Returns how many of `pages` pages bring, with the exact tokens of a budget, the bytes that `looked` names."""
        planes, _, width = pool.pages.shape[-3:]
        vector, exact = width * pool.pages.dtype.itemsize, self.num_exact(2**20, budget)
        # Keys first: the keys of twice as many pages as whole ones, and the values of the exact tokens.
        ranked = self.policy.pages_for(budget, 2**20)
        keys_first = ranked * self.policy.page_size * planes * vector + exact * (planes - 1) * vector
        room = int(MORE * keys_first) - exact * planes * vector
        return min(pages, max(-(-exact // self.policy.page_size), room // pool.codes.shape[-1]))

    def code_bytes(self, sizes: tuple[int, ...]) -> int:
        """Returns the bytes of a page's codes in the pool; `sizes` are the channels of its planes."""
        return self._codes(sizes).count

    def stored(self, pages: Stored, planes: PagePlanes, mask: Bool[Array, "B K P p"]) -> Stored:
        """Returns pages as the pool keeps them, from the pages without codes and their planes."""
        codes = self._codes(tuple(x.shape[-1] for x in planes)).write(planes[0], planes[1] if len(planes) > 1 else None, mask)
        return PagesWithCodes(pages, codes[..., None, None, :])

    def _codes(self, sizes: tuple[int, ...]) -> PageBytes:
        """Returns how the codes of pages lie in bytes; `sizes` are the channels of their planes."""
        return PageBytes(self.policy.page_size, sizes, self.bits)

    def fetch_and_attend(self, state: ScaledState, heads: Heads, near: Near, found: Selection, view: View) -> Step:
        with jax.named_scope("fetch"):
            codes, fetched_pages = view.pool.codes.fetch_live(found.ids, found.counts > 0)
        with jax.named_scope("attend"):
            wanted = self.num_fetched(self.policy.index.counts(state.index).shape[-1])
            best = self.best(heads, near, codes, found, planes=view.pool.pages.shape[-3], wanted=wanted)
        attended, best, state = super().fetch_and_attend(state, heads, near, best, view)
        return attended, best, replace(state, fetched=state.fetched + self.in_slots(fetched_pages, view.pool.pool))

    def best(
        self, heads: Heads, near: Near, codes: Fetched, found: Selection, *, planes: int, wanted: int, estimate: bool = False
    ) -> Selection:
        """Returns the `wanted` best tokens of the selected pages by their codes, and as `tail` all that is not among them.

        Args:
            codes: the codes of the selected pages, in one plane.
            planes: vectors per slot.
            estimate: whether to estimate the error that the codes leave (`Selection.noise`).
        """
        sizes, p = (heads.k.shape[-1], heads.v.shape[-1])[:planes], self.policy.page_size
        pages = self._codes(sizes).read(codes[0][..., 0, :], found.counts)
        options = dict(page_size=p, bits=self.bits, wanted=wanted, estimate=estimate)
        tokens = tokens_by_codes(heads, near, pages, found.tail, **options)
        slots = jnp.take_along_axis(found.ids, tokens.ids // p, axis=2, mode="promise_in_bounds") * p + tokens.ids % p
        return replace(found, ids=slots, counts=tokens.counts, tail=tokens.rest, noise=tokens.noise)

    def in_slots(self, pages: Int[Array, " B"], pool: Any) -> Int[Array, " B"]:
        """Returns as how many slots of keys and values the codes of so many pages count, by their bytes, rounded up."""
        slot = pool.pages.shape[-3] * pool.pages.shape[-1] * pool.pages.dtype.itemsize
        return -(-pages * pool.codes.shape[-1] // slot)

    def attend(self, heads: Heads, near: Near, pages: Pages, found: Selection) -> tuple[Attended, Float[Array, "B K M p"]]:
        del near  # in the tail
        return attend_best_tokens(heads, pages, found.tail)
