"""The exact top tokens that have a given share of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.policies.full import check_dense
from icejax.cache.policies.oracle import Ranked
from icejax.ranges import number


@dataclass(frozen=True)
class TopP(Ranked):
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
        check_dense(self.dense_layers)

    def chosen(self, scores: Float[Array, "R G S"], newest: Int[Array, " R"]) -> Bool[Array, "R G S"]:
        weights, slots = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), scores.shape[-1])
        # A token is needed if those before it have not enough; so is the first, whatever the mass.
        needed = jnp.cumsum(weights, axis=-1) - weights < self.mass
        return jnp.put_along_axis(jnp.zeros(scores.shape, bool), slots, needed, axis=-1, inplace=False)
