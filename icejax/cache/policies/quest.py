"""Quest (arXiv 2406.10774): pages in order of position, selected by bounds on their keys (`--cache quest`).

Bounds are [B, K, P, H], page scores f32[B, K, G, P].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.retrieval import Retrieval
from icejax.cache.bases.selection import Selection, of_query_heads
from icejax.cache.bases.window import Window
from icejax.cache.index.base import PageIndex
from icejax.cache.protocol import Heads, View, check_dense_layers
from icejax.cache.sizes import CacheSpec
from icejax.checks.numbers import integer, power_of_two
from icejax.ops.attention.dense import products
from icejax.ops.topk import best


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bounds:
    """Least and largest key of every page, channel by channel, and its number of tokens."""

    low: jax.Array  # dtype[B, K, P, H]
    high: jax.Array  # dtype[B, K, P, H]
    count: jax.Array  # i32[B, K, P]


class BoundsIndex(PageIndex[Bounds, Bounds, Bounds]):
    """Index of the bounds of every page."""

    def empty(self, spec: CacheSpec, pages: int) -> Bounds:
        shape = (spec.batch_size, spec.num_kv_heads, pages)
        zeros = jnp.zeros((*shape, spec.head_dim), spec.dtype)
        return Bounds(zeros, zeros, jnp.zeros(shape, jnp.int32))

    def counts(self, index: Bounds) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Bounds:
        low, high = (f(jnp.where(mask[..., None], k, end), axis=3) for f, end in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
        filled = mask.any(-1)[..., None]
        return Bounds(jnp.where(filled, low, 0), jnp.where(filled, high, 0), mask.sum(-1, dtype=jnp.int32))


def bound(q: Float[Array, "B K G H"], index: Bounds) -> Float[Array, "B K G P"]:
    """Returns the largest product of a query with any key within the bounds of each page; -inf for an empty page.

    For q = [1, -2], low = [0, -1], high = [2, 3]: 1 * 2 + -2 * -1 = 4. Products are neither scaled nor capped: both keep the
    order, and a cap would make large bounds equal.
    """
    q, low, high = (x.astype(jnp.float32) for x in (q, index.low, index.high))
    upper_bound = products(jnp.minimum(q, 0), low) + products(jnp.maximum(q, 0), high)
    return jnp.where(index.count[:, :, None] > 0, upper_bound, -jnp.inf)


@dataclass(frozen=True)
class Quest(Retrieval):
    """Quest: every query head attends to its own pages, those with the highest upper bound on products of query and key.

    The page that decoded tokens are filling is always attended to and counts in the budget, as in the authors' code. Their
    page begins with the last tokens of the prompt; here these tokens form a separate page, which may be partly filled and is
    selected like the others.

    Attributes:
        budget: tokens attended exactly per query head and layer, the newest ones included.
        page_size: consecutive tokens in a page.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    page_size: int = 16
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        power_of_two("page_size", self.page_size, least=4, most=128)
        integer("budget", self.budget, least=2 * self.page_size)
        check_dense_layers(self.dense_layers)

    per_query_head = True
    by_head = True

    @property
    def window_layout(self) -> Window:
        return Window(0, self.page_size, self.page_size)  # the window is empty after a text

    @property
    def index(self) -> BoundsIndex:
        return BoundsIndex()

    def find(self, heads: Heads, index: Bounds, view: View) -> Selection:
        worth = bound(heads.by_group(), index)
        counts = jnp.broadcast_to(index.count[:, :, None], worth.shape)
        page_ids, selected, (counts,) = best(worth, self.num_fetched(worth.shape[-1]), counts)
        return of_query_heads(page_ids, counts, selected)
