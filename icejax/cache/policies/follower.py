"""A follower layer: it attends to the tokens that an earlier layer chose, given by their positions.

Used by `OmniKV`. Positions are i32[B, M], first positions and counts of pages i32[B, K, P].
"""

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
    """Positions of the tokens of every page, which are consecutive: the position of the first token, and their number."""

    first: jax.Array  # i32[B, K, P]
    count: jax.Array  # i32[B, K, P]


class PlacesIndex(PageIndex[Places, Int[Array, "B K M"], Places]):
    """Positions of the tokens of every page; pages come in order of position, from position 0 on.

    After 20 tokens in pages, new pages with 16, 16 and 5 tokens begin at the positions 20, 36 and 52.
    """

    def empty(self, spec: CacheSpec, pages: int) -> Places:
        zeros = jnp.zeros((spec.batch_size, spec.num_kv_heads, pages), jnp.int32)
        return Places(zeros, zeros)

    def counts(self, index: Places) -> Int[Array, "B K P"]:
        return index.count

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Int[Array, "B K P"]:
        return mask.sum(-1, dtype=jnp.int32)

    def page_update(self, index: Places, described: Int[Array, "B K M"], first: Int[Array, ""]) -> Places:
        positions = index.count.sum(-1, keepdims=True) + jnp.cumsum(described, axis=-1) - described
        return Places(positions, described)


@dataclass(frozen=True)
class PositionFollower(Retrieval):
    """A layer that attends to the tokens chosen by an earlier layer, which shares their positions i32[B, M]; below 0: no token.

    Tokens chosen again in the next step stay on the device. The window holds the tokens decoded since the last page left it;
    they are attended to whether chosen or not.

    Attributes:
        budget: tokens chosen by the earlier layer's scores.
        generated: newest decoded tokens, chosen besides.
    """

    budget: int = 256
    generated: int = 512
    page_size = PAGE
    by_slot = True
    resident = True
    follows = True
    window_layout = Window(0, PAGE, PAGE)
    index = PlacesIndex()

    def num_fetched(self, pages: int) -> int:
        return min(self.budget, pages * self.page_size) + self.generated

    def find(self, heads: Heads, index: Places, view: View) -> Selection:
        """Returns the slots of the chosen positions.

        If pages begin at the positions 0, 16 and 21, position 23 is the third token of page 2: slot 2 * 16 + 2 = 34.
        """
        position = view.shared.choice[:, :, None]
        first, count = index.first[:, :1], index.count[:, :1]  # all KV heads have the same
        in_page = (position >= first) & (position < first + count)
        page, is_stored = in_page.argmax(-1).astype(jnp.int32), in_page.any(-1)
        slot = page * self.page_size + position[..., 0] - jnp.take_along_axis(first[:, 0], page, axis=1)
        ids = jnp.where(is_stored, slot, 0)
        shape = (*index.count.shape[:2], ids.shape[1])
        ids, counts = (jnp.broadcast_to(x[:, None].astype(jnp.int32), shape) for x in (ids, is_stored))
        return Selection(ids, counts, choice=view.shared.choice)
