"""A layer that follows another: it attends to single tokens that were chosen for it, by their positions."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.retrieval import PAGE, Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.window import Window
from icejax.cache.index.base import PageIndex
from icejax.cache.protocol import Heads, View
from icejax.cache.sizes import CacheSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Places:
    """Where the tokens of every page stand in the text, one behind another: the position of the first, and how many."""

    first: jax.Array  # i32[B, K, P]
    count: jax.Array  # i32[B, K, P]


class PlacesIndex(PageIndex[Places, Int[Array, "B K M"], Places]):
    """Where the tokens of every page stand, which come in order of position and from its beginning on."""

    def empty(self, spec: CacheSpec, pages: int) -> Places:
        none = jnp.zeros((spec.batch_size, spec.num_kv_heads, pages), jnp.int32)
        return Places(none, none)

    def counts(self, index: Places) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Int[Array, "B K P"]:
        return mask.sum(-1, dtype=jnp.int32)

    def page_update(self, index: Places, described: Int[Array, "B K M"], first: Int[Array, ""]) -> Places:
        before = index.count.sum(-1, keepdims=True) + jnp.cumsum(described, axis=-1) - described
        return Places(before, described)


@dataclass(frozen=True)
class PositionFollower(Retrieval):
    """A layer that attends to the tokens chosen by one before it, which hands on their positions i32[B, M]; some below 0: none.

    Those that stay chosen stay on the device. So do those decoded since a page left the window, chosen or not.

    Attributes:
        budget: tokens chosen of those that there are.
        generated: decoded tokens chosen besides.
    """

    budget: int = 256
    generated: int = 512
    page_size = PAGE
    by_slot = True
    resident = True
    follows = True
    window_of = Window(0, PAGE, PAGE)
    index = PlacesIndex()

    def num_fetched(self, pages: int) -> int:
        return min(self.budget, pages * self.page_size) + self.generated

    def find(self, heads: Heads, index: Places, view: View) -> Selection:
        position = view.shared.choice[:, :, None]
        first, count = index.first[:, :1], index.count[:, :1]  # of the first KV head: in all of them the same
        within = (position >= first) & (position < first + count)
        page, there = within.argmax(-1).astype(jnp.int32), within.any(-1)
        slot = page * self.page_size + position[..., 0] - jnp.take_along_axis(first[:, 0], page, axis=1)
        ids = jnp.where(there, slot, 0)
        shape = (*index.count.shape[:2], ids.shape[1])
        ids, counts = (jnp.broadcast_to(x[:, None].astype(jnp.int32), shape) for x in (ids, there))
        return Selection(ids, counts, choice=view.shared.choice)
