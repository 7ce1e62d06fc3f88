"""ArkVale (NeurIPS 2024): pages in order of position, chosen by the boxes in which most of their keys lie."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from icejax.cache.bases.retrieval import Retrieval
from icejax.cache.bases.selection import Selection
from icejax.cache.bases.window import Window
from icejax.cache.policies.quest import Bounds, BoundsIndex, bound
from icejax.cache.protocol import Heads, View, check_dense_layers
from icejax.checks.numbers import integer, one_of, power_of_two
from icejax.ops.topk import best

Together = Literal["layer", "kv"]


class CuboidIndex(BoundsIndex):
    """Around the middle of every page's keys, channel by channel, the box that reaches as far as they do in the mean."""

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Bounds:
        keys = jnp.where(mask[..., None], k, 0).astype(jnp.float32)
        box = super().describe(keys, None, mask)
        middle = (box.low + box.high) / 2
        far = jnp.where(mask[..., None], jnp.abs(keys - middle[..., None, :]), 0).sum(3)
        far /= jnp.maximum(box.count, 1)[..., None].astype(jnp.float32)
        return Bounds((middle - far).astype(k.dtype), (middle + far).astype(k.dtype), box.count)


@dataclass(frozen=True)
class ArkVale(Retrieval):
    """ArkVale: the first and the newest pages, and those whose box has the largest products with the layer's queries.

    As in its code, the query heads of the whole layer attend to the same pages. There the pages of earlier steps that are still
    on the device are attended to as well; here they are not, so that the budget holds. A page of its code is complete; here
    the last one of a prompt may be filled in part, and the window is full or lacks up to a page.

    Attributes:
        budget: tokens attended exactly per KV head and layer, first and newest pages included.
        page_size: tokens of a page, which stand behind one another in the text.
        sinks: first pages, kept on the device.
        window: newest pages, kept on the device.
        heads: which query heads agree on pages by the mean of their scores: all of the `layer`, as by default in its code, or
            those of a `kv` head.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    page_size: int = 32
    sinks: int = 2
    window: int = 2
    heads: Together = "layer"
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        power_of_two("page_size", self.page_size, least=4, most=128)
        integer("sinks", self.sinks, least=0, most=1024)
        integer("window", self.window, least=2, most=1024)
        integer("budget", self.budget, least=(self.sinks + self.window + 1) * self.page_size)
        one_of("heads", self.heads, typing.get_args(Together))
        check_dense_layers(self.dense_layers)

    @property
    def window_of(self) -> Window:
        return Window(self.sinks * self.page_size, self.window * self.page_size, self.page_size)

    @property
    def index(self) -> CuboidIndex:
        return CuboidIndex()

    def find(self, heads: Heads, index: Bounds, view: View) -> Selection:
        together = (1, 2) if self.heads == "layer" else 2
        worth = bound(heads.by_group(), index).mean(together, keepdims=True)
        worth = jnp.broadcast_to(worth[:, :, 0], index.count.shape)
        page_ids, _, (counts,) = best(worth, self.num_fetched(worth.shape[-1]), index.count)
        return Selection(page_ids, counts)
