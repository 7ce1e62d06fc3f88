"""Expected attention (arXiv 2510.00636): keeps the tokens with the highest expected attention from future queries.

`--cache expected-attention`. The queries' mean is [B, K, G, H], their covariance [B, K, G, H, H]; scores are f32[B, K, S].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import Eviction, Slots
from icejax.cache.protocol import Heads, View
from icejax.checks.numbers import integer, number
from icejax.ops.attention.dense import BLOCK, EINSUM, Attended, Scoring
from icejax.ops.slots import split_heads


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """Expected attention: a text's queries before RoPE are modelled as one Gaussian, rotated to future positions.

    The score is that of kvpress's ExpectedAttentionPress with its defaults. The mean m and the covariance C of the text's
    queries, without its sinks, are rotated by the mean rotation of the next `future` positions. The softmax over keys k of
    s k.m + s^2/2 k.C k, s the scale of scores, averaged over the query heads of a KV head, is a token's weight; its score is
    the weight times the norm of its value. On kvpress's leaderboard it has an `epsilon` of 0.01, and KV heads share a budget by
    AdaKV's rule; that rule is not here. Each row of a batch has its own statistics, and so has each later text. Where scores
    have a soft cap, which kvpress does not support, the second term uses the cap's slope at the first.

    Attributes:
        budget: tokens kept per KV head and layer after a text, sinks included; decoded tokens come on top.
        sinks: first tokens, which stay and whose queries are left out.
        future: number of positions after the text at which queries are expected.
        epsilon: added to every token's weight before the product with the norm of its value.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a token after the sinks.
    """

    budget: int = 256
    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        integer("budget", self.budget, least=self.sinks + 1)
        integer("future", self.future, most=2**12)
        number("epsilon", self.epsilon, least=0, most=1)

    on_top = True
    rerotates = True

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        mean, covariance = self._expected_queries(heads, view)
        keys = split_heads(self.keys(tokens, view), heads.k.shape[2])

        def log_weights(keys: jax.Array) -> jax.Array:
            return log_mean_exp(keys, mean, covariance, scoring=heads.scoring)

        logits = jnp.moveaxis(jax.lax.map(log_weights, jnp.moveaxis(keys, 2, 0), batch_size=BLOCK), 0, -1)  # B K G S
        beyond_sinks = (tokens.positions >= self.sinks)[:, :, None]
        weights = jax.nn.softmax(jnp.where(beyond_sinks, logits, jnp.finfo(jnp.float32).min), axis=-1).mean(2)
        norms = jnp.linalg.norm(split_heads(tokens.v, heads.k.shape[2]).astype(jnp.float32), axis=-1)
        return jnp.where(tokens.positions < self.sinks, jnp.inf, (weights + self.epsilon) * norms)

    def _expected_queries(self, heads: Heads, view: View) -> tuple[Float[Array, "B K G H"], Float[Array, "B K G H H"]]:
        """Returns the mean and the covariance of future queries, estimated from a text's queries."""
        batch, text, num_heads, size = heads.q.shape
        indices = jnp.arange(text)[None]
        positions = view.lengths.seen[:, None] + indices
        counts = (indices < heads.lengths[:, None]) & (positions >= self.sinks)
        block = math.gcd(BLOCK, text)
        parts = tuple(x.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1) for x in (heads.q, positions, counts))

        def mean_over_queries(statistic: Callable[[jax.Array], jax.Array], mean: jax.Array | float, *shape: int) -> jax.Array:
            """Returns the mean over queries of `statistic(q - mean)`; a second pass for the covariance loses no digits."""

            def add_block(total: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                q, position, counted = part
                q = view.rerotate(q.astype(jnp.float32), -position) - mean
                return total + statistic(jnp.where(counted[..., None, None], q, 0)), None

            total = jax.lax.scan(add_block, jnp.zeros((batch, num_heads, *shape)), parts)[0]
            return total / jnp.maximum(counts.sum(1, dtype=jnp.float32), 1).reshape(-1, 1, *(1,) * len(shape))

        mean = mean_over_queries(lambda q: q.sum(1), 0.0, size)
        covariance = mean_over_queries(lambda q: EINSUM("btni,btnj->bnij", q, q), mean[:, None], size, size)
        # A rotation is linear, so that the rotated basis is its matrix: the mean rotation, moved to the end of the text.
        basis = jnp.broadcast_to(jnp.eye(size)[None, None], (1, self.future, size, size))
        basis = view.rerotate(basis, jnp.arange(self.future)[None]).mean(1, keepdims=True)
        ends = (view.lengths.seen + heads.lengths)[:, None]
        rotation = view.rerotate(jnp.broadcast_to(basis, (batch, 1, size, size)), ends)[:, 0]
        mean = EINSUM("bni,bij->bnj", mean, rotation)
        covariance = EINSUM("bnij,bih,bjg->bnhg", covariance, rotation, rotation)
        return tuple(x.reshape(batch, heads.k.shape[2], -1, *x.shape[2:]) for x in (mean, covariance))


def log_mean_exp(
    keys: Float[Array, "B K H"], mean: Float[Array, "B K G H"], covariance: Float[Array, "B K G H H"], *, scoring: Scoring
) -> Float[Array, "B K G"]:
    """Returns the log of the mean of exp(score) of each key over Gaussian queries, per query head, in fp32.

    Exact without a soft cap; with one, to first order around the score of the mean query.
    """
    scores = scoring(EINSUM("bkh,bkgh->bkg", keys, mean))
    variance = scoring.scale**2 * EINSUM("bki,bkgij,bkj->bkg", keys, covariance, keys)
    return scores + jnp.square(scoring.slope(scores)) * variance / 2
