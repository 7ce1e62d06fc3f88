"""SnapKV (arXiv 2404.14469): of a prompt the tokens that its last queries attend to."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import Eviction, ScoreGroup, Slots, grouped, last_queries
from icejax.cache.protocol import Heads, View
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, one_of
from icejax.ops.attention.dense import Attended
from icejax.ops.attention.recent_attention import observed
from icejax.ops.slots import apart

Pooling = Literal["avg", "max"]


@dataclass(frozen=True)
class SnapKV(Eviction):
    """SnapKV: the last tokens of a text, and those before them that they attend to most; decoded tokens stay.

    The paper's code evicts per query head; here it is per KV head, as in kvpress and, as an option, KVCache-Factory. Query
    heads agree on what a token is worth before neighbours are pooled.

    Attributes:
        budget: tokens kept per KV head and layer after a text; decoded tokens come on top.
        window: last tokens of a text, which stay and whose queries decide.
        kernel: neighbours over which attention is pooled, an odd number.
        pooling: avg (its own code) or max (its settings for LongBench).
        group: how the query heads of a KV head agree: mean (as kvpress), max or sum.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    window: int = 32
    kernel: int = 5
    pooling: Pooling = "avg"
    group: ScoreGroup = "mean"

    def __post_init__(self) -> None:
        integer("window", self.window, most=2**20)
        integer("budget", self.budget, least=self.window)
        integer("kernel", self.kernel, most=1023)
        if self.kernel % 2 == 0:
            raise InputError(f"kernel must be an odd number, got {self.kernel}")
        one_of("pooling", self.pooling, typing.get_args(Pooling))
        one_of("group", self.group, typing.get_args(ScoreGroup))

    on_top = True

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        q, lse, asking = last_queries(heads, attended, view, self.window)
        keys = apart(self.keys(tokens, view), heads.k.shape[2])
        weights = observed(q, lse, keys, asking=asking, positions=tokens.positions, scoring=heads.scoring)
        first = (view.lengths.seen + jnp.maximum(heads.lengths - self.window, 0))[:, None, None]
        inside = (tokens.there & (tokens.positions < first))[:, :, None]
        outside, total = (0.0, jax.lax.add) if self.pooling == "avg" else (-jnp.inf, jax.lax.max)
        agreed = grouped(jnp.where(inside, weights, outside), self.group)
        pooled = jax.lax.reduce_window(agreed, outside, total, (1, 1, self.kernel), (1, 1, 1), "SAME")
        return jnp.where(tokens.positions >= first, jnp.inf, pooled)
