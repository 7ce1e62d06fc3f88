"""Oracle of the top tokens by exact scores, as many as a budget (`--cache topk`). Scores are f32[B K, G, S]."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.oracle import TokenOracle
from icejax.cache.protocol import check_dense_layers
from icejax.checks.numbers import integer, one_of
from icejax.ops.topk import largest

Group = Literal["none", "sum"]


@dataclass(frozen=True)
class TopK(TokenOracle):
    """The exact top tokens: every query head attends to the tokens of highest score.

    Attributes:
        budget: tokens attended to.
        group: sum: the query heads of a KV head attend to the same tokens, by the sum of their softmax weights; none: every
            query head attends to its own tokens.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    group: Group = "none"
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("budget", self.budget)
        one_of("group", self.group, typing.get_args(Group))
        check_dense_layers(self.dense_layers)

    def chosen(self, scores: Float[Array, "R G S"], newest: Int[Array, " R"]) -> Bool[Array, "R g S"]:
        worth = scores if self.group == "none" else jax.nn.softmax(scores, axis=-1).sum(1, keepdims=True)
        return largest(worth, jnp.full(worth.shape[:-1], self.budget), most=self.budget)
