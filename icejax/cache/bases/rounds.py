"""The rounds of a step that estimates its error: a round attends to pages, exactly or first in codes, and estimates its error.

Policy Tolerant calls one of these classes twice in a step. Ids and counts are i32[B, K, M], errors f32[B, K, G].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.looked_pages import LookedPages
from icejax.cache.bases.page_reads import InCodes
from icejax.cache.bases.reranking import attend_best
from icejax.cache.bases.retrieval import Near
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.two_precisions import attend_best_tokens, error_of_codes
from icejax.cache.pool.host_pool import Fetched, PoolLayer
from icejax.cache.pool.page_format import PagesWithCodes, Stored
from icejax.cache.protocol import Heads
from icejax.ops.attention.dense import Attended


class Slots(NamedTuple):
    """Where single slots are read.

    Attributes:
        planes: vectors per slot.
        read: takes ids and which of them are slots; returns the planes [B, K, M, 1, W], and how many slots it read, i32[B].
    """

    planes: int
    read: Callable[[Int[Array, "B K M"], Bool[Array, "B K M"]], tuple[Fetched, Int[Array, " B"]]]


class Round(NamedTuple):
    """The attention of a round.

    Attributes:
        ids, counts: the pages or single slots attended to exactly, as in `Selection`.
        weights: weights of their tokens, summed over query heads, f32[B, K, M, p or 1]; 0 for tokens not attended exactly.
        uneven: the norm of the weights' deviations, for tokens whose values are estimated, over the norm of the output.
        of_codes: estimated error of the tokens that count by their codes.
        slots: single slots that came from the host, i32[B].
    """

    attended: Attended
    ids: jax.Array
    counts: jax.Array
    weights: jax.Array
    uneven: jax.Array
    of_codes: jax.Array
    slots: jax.Array

    def error(self, gain: Float[Array, " B"]) -> Float[Array, "B K"]:
        """Returns the estimated relative error of each KV head; both parts are independent, so that their squares add up."""
        return jnp.sqrt(jnp.square(gain[:, None, None] * self.uneven) + jnp.square(self.of_codes)).mean(2)

    def where(self, mask: Bool[Array, "B K"], other: Round) -> Round:
        """Returns this round for the KV heads in `mask` and `other`, of no more pages, for the others."""

        def chosen(x: jax.Array, y: jax.Array) -> jax.Array:
            y = jnp.pad(y, [(0, more - less) for more, less in zip(x.shape, y.shape, strict=True)])
            return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 2)), x, y)

        merged = (chosen(x, y) for x, y in zip(self[1:-1], other[1:-1], strict=True))
        attended = Attended(*map(chosen, self.attended, other.attended))
        return Round(attended, *merged, self.slots + other.slots)


@dataclass(frozen=True)
class WholeRounds:
    """Attends to the best tokens of whole pages exactly.

    Attributes:
        policy: the policy whose step it is.
        most: largest budget of a round.
    """

    policy: LookedPages
    most: int

    def num_first(self, pages: int, pool: Any) -> int:
        """Returns how many of `pages` pages of a pool, or of an array like it, the first round reads."""
        return self.policy.pages_for(self.policy.budget, pages)

    def num_most(self, pages: int, pool: Any) -> int:
        """Returns how many of `pages` pages the second round reads."""
        return self.policy.pages_for(self.most, pages)

    def num_fetched(self, pages: int) -> int:
        """Returns how many of `pages` pages, or of their slots, a KV head attends to exactly at most."""
        return self.policy.pages_for(self.most, pages)

    def read(self, pool: PoolLayer) -> PoolLayer:
        """Returns the view of a pool through which a round reads selected pages."""
        return pool

    def read_of(self, stored: Stored) -> jax.Array:
        """Returns what `read` reads of pages as the pool stores them."""
        return stored

    def attend(self, heads: Heads, near: Near, pages: Fetched, found: Selection, budget: int, slots: Slots) -> Round:
        """Returns the round of a budget; `pages` are the selected pages as `read` gives them."""
        mask = jnp.arange(self.policy.page_size)[None, None, None] < found.counts[..., None]
        most, parts = self.policy.max_page_tokens(budget), (*heads.from_planes(pages), mask)
        attended, weights, uneven = attend_best(heads, near, parts, found, budget, most=most, tail=True)
        uneven, none = _unevenness(attended, uneven, found), jnp.zeros(len(heads.q), jnp.int32)
        return Round(attended, found.ids, found.counts, weights, uneven, jnp.zeros_like(uneven), none)

    def in_pool(self, pages: Int[Array, " B"], slots: Int[Array, " B"], pool: Any) -> Int[Array, " B"]:
        """Returns how many pages, or slots where single slots are attended to, came from the host."""
        return pages


@dataclass(frozen=True)
class CodedRounds(WholeRounds):
    """Looks at all tokens of pages in codes, and attends to the best of them exactly."""

    @property
    def _codes(self) -> InCodes:
        return self.policy.in_codes

    def num_first(self, pages: int, pool: Any) -> int:
        return self._codes.num_selected(pages, pool)

    def num_most(self, pages: int, pool: Any) -> int:
        return max(self.num_first(pages, pool), self._codes.num_for(self.most, pages, pool))

    def num_fetched(self, pages: int) -> int:
        return self._codes.num_exact(pages, self.most)

    def read(self, pool: PoolLayer) -> PoolLayer:
        return pool.codes

    def read_of(self, stored: PagesWithCodes) -> jax.Array:
        return stored.codes

    def attend(self, heads: Heads, near: Near, pages: Fetched, found: Selection, budget: int, slots: Slots) -> Round:
        wanted = self._codes.num_exact(found.ids.shape[-1], budget)
        best = self._codes.best(heads, near, pages, found, planes=slots.planes, wanted=wanted, estimate=True)
        planes, fetched = slots.read(best.ids, best.counts > 0)
        tokens = (*heads.from_planes(planes), best.counts[..., None] > 0)
        attended, weights = attend_best_tokens(heads, tokens, best.tail)
        of_codes = error_of_codes(best.noise, attended, self._codes.bits)
        uneven = _unevenness(attended, 0.0, found)
        return Round(attended, best.ids, best.counts, weights, uneven, of_codes, fetched)

    def in_pool(self, pages: Int[Array, " B"], slots: Int[Array, " B"], pool: Any) -> Int[Array, " B"]:
        return slots + self._codes.in_slots(pages, pool)


def _unevenness(attended: Attended, uneven: Float[Array, "B K G"] | float, found: Selection) -> Float[Array, "B K G"]:
    """Returns `Round.uneven` from that of fetched tokens, as a sum of squares, and of the tail."""
    tail = jnp.exp(2 * (found.tail.lse - attended.lse)) * found.uneven
    return jnp.sqrt(uneven + tail) / jnp.maximum(jnp.linalg.norm(attended.out, axis=-1), 1e-30)
