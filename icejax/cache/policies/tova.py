"""TOVA (arXiv 2401.06104): keeps the tokens that the newest query attends to (`--cache tova`).

Scores are the newest query's attention weights, f32[B, K, S].
"""

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
from icejax.ops.attention.recent_attention import recent_attention_sums
from icejax.ops.slots import split_heads

Agreed = Literal["layer", "mean", "max", "sum"]


@dataclass(frozen=True)
class TOVA(Eviction):
    """TOVA: every step evicts the token with the least attention from the newest query, whatever its earlier scores.

    The authors' code evicts after a step, here a token leaves before the next one: `budget`, which includes the newest token,
    is their cache size plus 1. The newest token may leave too, as in their code; kvpress's TOVAPress always keeps it.

    Attributes:
        budget: tokens attended exactly per KV head and layer, the newest included.
        group: how weights are combined over query heads: layer (the mean over all heads, so that all KV heads keep the same
            tokens, as in the authors' code), or mean, max or sum for each KV head.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    group: Agreed = "layer"

    def __post_init__(self) -> None:
        integer("budget", self.budget)
        one_of("group", self.group, typing.get_args(Agreed))

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        q, lse, query_positions = last_queries(heads, attended, view, 1)
        keys = split_heads(self.keys(tokens, view), heads.k.shape[2])
        return self.update(
            tokens,
            recent_attention_sums(q, lse, keys, asking=query_positions, positions=tokens.positions, scoring=heads.scoring),
        )

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        if self.group != "layer":
            return grouped(weights, self.group)
        return jnp.broadcast_to(weights.mean((1, 2))[:, None], tokens.positions.shape)
