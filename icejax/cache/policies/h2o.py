"""H2O (arXiv 2306.14048): the tokens that had most attention so far, and the newest ones."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import Eviction, ScoreGroup, Slots, grouped
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import integer, one_of
from icejax.ops.attention.dense import BLOCK, Attended
from icejax.ops.attention.key_attention_sums import column_sums
from icejax.ops.attention.recent_attention import observed
from icejax.ops.slots import apart


@dataclass(frozen=True)
class H2O(Eviction):
    """H2O: heavy hitters, the tokens whose attention weights sum up to most over all queries so far, and the newest tokens.

    Its own code lets a token leave after a step and not before the next one, so that `budget`, which the newest token is part
    of, is its heavy and its recent size and 1 more. It evicts per head of models without groups of query heads; here per KV
    head. kvpress's ObservedAttentionPress takes the mean over the queries that see a token; here it is the sum, as in the
    paper and its code.

    Attributes:
        budget: tokens attended exactly per KV head and layer, the newest included.
        recent: newest tokens that never leave; none: half of the budget.
        group: how the query heads of a KV head agree on what a text or a decoded token adds: mean, max or sum.

    Raises:
        InputError: an option is out of range, or the budget leaves no token that may leave.
    """

    budget: int = 256
    recent: int | None = None
    group: ScoreGroup = "mean"

    def __post_init__(self) -> None:
        integer("budget", self.budget)
        if self.recent is not None:
            integer("recent", self.recent, least=0, most=self.budget - 1)
        one_of("group", self.group, typing.get_args(ScoreGroup))

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        batch, text, num_heads, _ = heads.k.shape
        q, lse, scoring = heads.q, attended.lse, heads.scoring
        own = column_sums(q, heads.k, lse, lengths=heads.lengths, window=None, scoring=scoring)
        own = grouped(own.reshape(batch, num_heads, -1, text), self.group)
        before = tokens.positions.shape[2] - text
        if not before:
            return own
        number = jnp.arange(text)[None]
        asking = jnp.where(number < heads.lengths[:, None], view.lengths.seen[:, None] + number, -1)
        keys, positions = apart(self.keys(tokens, view), num_heads)[:, :, :before], tokens.positions[..., :before]

        def some(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return observed(*part[:2], keys, asking=part[2], positions=positions, scoring=scoring)

        block = math.gcd(BLOCK, text)
        parts = tuple(x.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1) for x in (q, lse, asking))
        more = grouped(jax.lax.map(some, parts).sum(0), self.group)
        return jnp.concatenate([tokens.scores[..., :before] + more, own], axis=2)

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        return tokens.scores + grouped(weights, self.group)

    def worth(self, tokens: Slots) -> Float[Array, "B K S"]:
        recent = self.budget // 2 if self.recent is None else self.recent
        first = tokens.positions.max(-1, keepdims=True) - recent + 1
        return jnp.where(tokens.positions >= first, jnp.inf, tokens.scores)
