"""SnapKV (arXiv 2404.14469): keeps the prompt tokens that the prompt's last queries attend to (`--cache snapkv`).

`AdaKV`, `PyramidKV` and `RocketKV` build on it. Scores are f32[B, K, S].
"""

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
from icejax.ops.attention.recent_attention import recent_attention_sums
from icejax.ops.slots import split_heads

Pooling = Literal["avg", "max"]


@dataclass(frozen=True)
class SnapKV(Eviction):
    """SnapKV: keeps the last tokens of a text, and the earlier tokens that their queries attend to most; decoded tokens stay.

    The authors' code evicts per query head; here eviction is per KV head, as in kvpress and, as an option, KVCache-Factory.
    Weights are combined over query heads before they are pooled over neighbours.

    Attributes:
        budget: tokens kept per KV head and layer after a text; decoded tokens come on top.
        window: last tokens of a text, which stay and whose queries score the others.
        kernel: neighbouring tokens over which attention is pooled, an odd number.
        pooling: avg (the authors' code) or max (their settings for LongBench).
        group: how the weights of a KV head's query heads are combined: mean (as kvpress), max or sum.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    window: int = 32
    kernel: int = 5
    pooling: Pooling = "avg"
    group: ScoreGroup = "mean"
    by_head = True

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
        q, lse, query_positions = last_queries(heads, attended, view, self.window)
        keys = split_heads(self.keys(tokens, view), heads.k.shape[2])
        weights = recent_attention_sums(q, lse, keys, asking=query_positions, positions=tokens.positions, scoring=heads.scoring)
        first = (view.lengths.seen + jnp.maximum(heads.lengths - self.window, 0))[:, None, None]
        inside = (tokens.there & (tokens.positions < first))[:, :, None]
        outside, total = (0.0, jax.lax.add) if self.pooling == "avg" else (-jnp.inf, jax.lax.max)
        agreed = grouped(jnp.where(inside, weights, outside), self.group)
        pooled = jax.lax.reduce_window(agreed, outside, total, (1, 1, self.kernel), (1, 1, 1), "SAME")
        return jnp.where(tokens.positions >= first, jnp.inf, pooled)
