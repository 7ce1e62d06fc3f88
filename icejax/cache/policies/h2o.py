"""H2O (arXiv 2306.14048): keeps the tokens with most attention so far, and the newest tokens (`--cache h2o`).

Scores are attention weights summed over queries, f32[B, K, S].
"""

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
from icejax.ops.attention.key_attention_sums import key_attention_sums
from icejax.ops.attention.recent_attention import recent_attention_sums
from icejax.ops.slots import split_heads


@dataclass(frozen=True)
class H2O(Eviction):
    """H2O: the tokens with the largest sum of attention weights over all queries so far (heavy hitters), and the newest tokens.

    The authors' code evicts after a step, here a token leaves before the next one: `budget`, which includes the newest token,
    is their heavy size plus their recent size plus 1. They evict per head, in models without groups of query heads; here
    eviction is per KV head. kvpress's ObservedAttentionPress takes the mean over the queries that see a token; here weights
    are summed, as in the paper and the authors' code.

    Attributes:
        budget: tokens attended exactly per KV head and layer, the newest included.
        recent: newest tokens, which are never evicted; None: half of the budget.
        group: how the weights of a KV head's query heads are combined before they are added: mean, max or sum.

    Raises:
        InputError: an option is out of range, or the budget leaves no token to evict.
    """

    budget: int = 256
    recent: int | None = None
    group: ScoreGroup = "mean"

    packs_by_head = True  # the sums of a text cost as much as its attention

    def __post_init__(self) -> None:
        integer("budget", self.budget)
        if self.recent is not None:
            integer("recent", self.recent, least=0, most=self.budget - 1)
        one_of("group", self.group, typing.get_args(ScoreGroup))

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        batch, text, num_heads, _ = heads.k.shape
        q, lse, scoring = heads.q, attended.lse, heads.scoring
        text_scores = key_attention_sums(q, heads.k, lse, lengths=heads.lengths, window=None, scoring=scoring)
        text_scores = grouped(text_scores.reshape(batch, num_heads, -1, text), self.group)
        num_kept = tokens.positions.shape[2] - text
        if not num_kept:
            return text_scores
        indices = jnp.arange(text)[None]
        query_positions = jnp.where(indices < heads.lengths[:, None], view.lengths.seen[:, None] + indices, -1)
        keys, positions = split_heads(self.keys(tokens, view), num_heads)[:, :, :num_kept], tokens.positions[..., :num_kept]

        def block_weights(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return recent_attention_sums(*part[:2], keys, asking=part[2], positions=positions, scoring=scoring)

        block = math.gcd(BLOCK, text)
        parts = tuple(x.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1) for x in (q, lse, query_positions))
        gained = grouped(jax.lax.map(block_weights, parts).sum(0), self.group)
        return jnp.concatenate([tokens.scores[..., :num_kept] + gained, text_scores], axis=2)

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        return tokens.scores + grouped(weights, self.group)

    def worth(self, tokens: Slots) -> Float[Array, "B K S"]:
        recent = self.budget // 2 if self.recent is None else self.recent
        first = tokens.positions.max(-1, keepdims=True) - recent + 1
        return jnp.where(tokens.positions >= first, jnp.inf, tokens.scores)
