"""The exact top tokens that have a given share of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from icejax.cache.bases.oracle import TokenOracle
from icejax.cache.protocol import check_dense_layers
from icejax.checks.numbers import number
from icejax.ops.threshold import ordered, threshold


@dataclass(frozen=True)
class TopP(TokenOracle):
    """The exact top tokens up to a mass: every query head attends to the fewest that have so much of its attention.

    Attributes:
        mass: share of the softmax weight that the tokens attended to have at least.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range.
    """

    mass: float = 0.95
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        number("mass", self.mass, least=0, most=1, above=True)
        check_dense_layers(self.dense_layers)

    def chosen(self, scores: Float[Array, "R G S"], newest: Int[Array, " R"]) -> Bool[Array, "R G S"]:
        weights = jax.nn.softmax(scores, axis=-1)
        flat, order = weights.reshape(-1, weights.shape[-1]), ordered(weights)

        def enough(least: UInt32[Array, "B N"]) -> Bool[Array, "B N"]:
            heavy = order.reshape(flat.shape)[:, None] >= least[:, :, None]
            return jnp.where(heavy, flat[:, None], 0).sum(-1) >= self.mass

        least = threshold(enough, len(flat)).reshape(*weights.shape[:-1], 1)
        more, same = order > least, order == least
        # Of equal weight the first are needed, while those before them have not enough.
        earlier = jnp.cumsum(same, axis=-1, dtype=weights.dtype) - 1
        before = jnp.where(more, weights, 0).sum(-1, keepdims=True) + earlier * weights
        return more | (same & (before < self.mass))
