"""Oracle of the top pages by exact scores, as many as fit a budget (`--cache topk-pages`). Scores are f32[B K, G, S]."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.oracle import TokenOracle
from icejax.cache.protocol import check_dense_layers
from icejax.checks.numbers import integer, power_of_two
from icejax.ops.topk import largest


@dataclass(frozen=True)
class TopKPages(TokenOracle):
    """The exact top pages: a KV head attends to the pages of consecutive tokens with most of its query heads' attention.

    Attributes:
        budget: tokens of the pages attended to; the newest page is always one of them, even if it is not full.
        page_size: consecutive tokens in a page, from the beginning of the text on.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    page_size: int = 16
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        power_of_two("page_size", self.page_size, most=128)
        integer("budget", self.budget, least=self.page_size)
        check_dense_layers(self.dense_layers)

    def chosen(self, scores: Float[Array, "R G S"], newest: Int[Array, " R"]) -> Bool[Array, "R 1 S"]:
        # A page's share of the softmax ranks pages as the log-sum-exp does, and can be summed over query heads.
        weights = jax.nn.softmax(scores, axis=-1).sum(1)
        mass = weights.reshape(len(weights), -1, self.page_size).sum(-1)
        mass = jnp.where(jnp.arange(mass.shape[1])[None] == newest[:, None] // self.page_size, jnp.inf, mass)
        pages = self.budget // self.page_size
        return jnp.repeat(largest(mass, jnp.full(len(mass), pages), most=pages), self.page_size, axis=1)[:, None]
