"""The exact top tokens that have a given share of the attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.policies.full import check_dense
from icejax.cache.policies.oracle import Ranked
from icejax.ranges import number

ONE = 0x3F800000  # the bits of 1.0, the largest of all weights


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
        weights = jax.nn.softmax(scores, axis=-1)
        bits = jax.lax.bitcast_convert_type(weights, jnp.int32)  # in the order of the weights, as none is negative

        def halved(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends
            middle = low + (high - low) // 2
            enough = jnp.where(bits >= middle, weights, 0).sum(-1, keepdims=True) >= self.mass
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        # The largest weight that tokens must have for the mass: by halving, as a sort takes many times as long.
        none = jnp.zeros_like(bits[..., :1])
        least, _ = jax.lax.fori_loop(0, 31, halved, (none, none + ONE + 1))
        more, same = bits > least, bits == least
        # Of equal weight the first are needed, while those before them have not enough.
        earlier = jnp.cumsum(same, axis=-1, dtype=weights.dtype) - 1
        before = jnp.where(more, weights, 0).sum(-1, keepdims=True) + earlier * weights
        return more | (same & (before < self.mass))
