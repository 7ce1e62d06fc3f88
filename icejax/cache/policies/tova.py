"""TOVA (arXiv 2401.06104): the tokens that the newest query attends to."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import Eviction, Slots, grouped, last_queries
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import integer, one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.attention.recent_attention import observed
from icejax.ops.slots import apart

Agreed = Literal["layer", "mean", "max", "sum"]


@dataclass(frozen=True)
class TOVA(Eviction):
    """TOVA: after every step the token leaves that the newest query weighs least, whatever it was worth before.

    Its own code lets a token leave after a step and not before the next one, so that `budget`, which the newest token is part
    of, is its cache size and 1 more. The newest token may leave too, as there; kvpress's TOVAPress holds on to it.

    Attributes:
        budget: tokens attended exactly per KV head and layer, the newest included.
        group: how query heads agree: layer (its own code, the mean over all heads, so that all KV heads keep the same tokens),
            or for each KV head mean, max or sum.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    group: Agreed = "layer"

    def __post_init__(self) -> None:
        integer("budget", self.budget)
        one_of("group", self.group, typing.get_args(Agreed))

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        q, lse, asking = last_queries(heads, attended, view, 1)
        keys = apart(self.keys(tokens, view), heads.k.shape[2])
        return self.update(tokens, observed(q, lse, keys, asking=asking, positions=tokens.positions, scoring=heads.scoring))

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        if self.group != "layer":
            return grouped(weights, self.group)
        return jnp.broadcast_to(weights.mean((1, 2))[:, None], tokens.positions.shape)
