"""ArkVale (NeurIPS 2024): pages in order of position, selected by boxes around most of their keys (`--cache arkvale`).

Boxes are [B, K, P, H], page scores f32[B, K, P].
"""

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
    """A box per page: in each channel the middle of its keys' range, plus and minus their mean distance from this middle.

    Keys of 0, 2 and 10 in a channel have the middle 5 and the distances 5, 3 and 5: the box is 0.67 to 9.33.
    """

    def describe(
        self, k: Float[Array, "B K P p H"], v: Float[Array, "B K P p Hv"] | None, mask: Bool[Array, "B K P p"]
    ) -> Bounds:
        keys = jnp.where(mask[..., None], k, 0).astype(jnp.float32)
        box = super().describe(keys, None, mask)
        middle = (box.low + box.high) / 2
        half_width = jnp.where(mask[..., None], jnp.abs(keys - middle[..., None, :]), 0).sum(3)
        half_width /= jnp.maximum(box.count, 1)[..., None].astype(jnp.float32)
        return Bounds((middle - half_width).astype(k.dtype), (middle + half_width).astype(k.dtype), box.count)


@dataclass(frozen=True)
class ArkVale(Retrieval):
    """ArkVale: attends to the first and newest pages, and to the pages whose boxes have the largest products with the queries.

    As in the authors' code, all query heads of a layer attend to the same pages. Their code also attends to pages of earlier
    steps that are still on the device; here a step does not, so that the budget holds. Their pages are always full; here the
    last page of a prompt may be partly filled, and the window lacks up to a page.

    Attributes:
        budget: tokens attended exactly per KV head and layer, first and newest pages included.
        page_size: consecutive tokens in a page.
        sinks: first pages, kept on the device.
        window: newest pages, kept on the device.
        heads: query heads that agree on pages, by the mean of their scores: layer (all query heads, the default of the authors'
            code) or kv (the query heads of a KV head).
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
    def window_layout(self) -> Window:
        return Window(self.sinks * self.page_size, self.window * self.page_size, self.page_size)

    @property
    def index(self) -> CuboidIndex:
        return CuboidIndex()

    def find(self, heads: Heads, index: Bounds, view: View) -> Selection:
        axes = (1, 2) if self.heads == "layer" else 2
        worth = bound(heads.by_group(), index).mean(axes, keepdims=True)
        worth = jnp.broadcast_to(worth[:, :, 0], index.count.shape)
        page_ids, _, (counts,) = best(worth, self.num_fetched(worth.shape[-1]), index.count)
        return Selection(page_ids, counts)
