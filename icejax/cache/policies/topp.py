"""Oracle of the top tokens with a given share of the attention (`--cache topp`). Scores are f32[B K, G, S]."""

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
    """The exact top tokens up to a mass: every query head attends to the fewest tokens that have this share of its attention.

    Of the softmax weights 0.5, 0.2, 0.2 and 0.1, a mass of 0.6 takes the first two tokens, 0.8 the first three.

    Attributes:
        mass: least share of the softmax weights that the tokens attended to have.
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

        def reaches_mass(lowest: UInt32[Array, "B N"]) -> Bool[Array, "B N"]:
            heavy = order.reshape(flat.shape)[:, None] >= lowest[:, :, None]
            return jnp.where(heavy, flat[:, None], 0).sum(-1) >= self.mass

        lowest = threshold(reaches_mass, len(flat)).reshape(*weights.shape[:-1], 1)
        heavier, tied = order > lowest, order == lowest
        # Of tied tokens the first are chosen, as long as the tokens before them have less than the mass.
        earlier = jnp.cumsum(tied, axis=-1, dtype=weights.dtype) - 1
        before = jnp.where(heavier, weights, 0).sum(-1, keepdims=True) + earlier * weights
        return heavier | (tied & (before < self.mass))
