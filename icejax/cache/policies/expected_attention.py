"""Expected attention (arXiv 2510.00636): the tokens that queries to come are expected to attend to."""

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
from icejax.ops.slots import apart


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """Expected attention: a text's queries before RoPE are taken as draws of one Gaussian, turned to the positions to come.

    The score is that of kvpress's ExpectedAttentionPress with its defaults: with the mean and the covariance of the text's
    queries, its sinks left out, turned by the mean rotation of the next `future` positions, the softmax over keys k of
    s k.mean + s^2/2 k.covariance.k, its mean over the query heads of a KV head, times the norm of the value. On kvpress's board
    it has an `epsilon` of 0.01, and KV heads share a budget by AdaKV's rule, which is not here. Each row of a batch has
    statistics of its own, and more text behind a cache those of its own queries. Where scores have a soft cap, which kvpress
    does not know, the second term is taken with its slope at the first.

    Attributes:
        budget: tokens kept per KV head and layer after a text, sinks included; decoded tokens come on top.
        sinks: first tokens, which stay and whose queries do not count.
        future: positions behind the text that queries are expected at.
        epsilon: what is added to the weight of every token before the norm of its value counts.

    Raises:
        InputError: an option is out of range, or the budget leaves no room for a token behind the sinks.
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
        keys = apart(self.keys(tokens, view), heads.k.shape[2])

        def one(keys: jax.Array) -> jax.Array:
            return log_mean_exp(keys, mean, covariance, scoring=heads.scoring)

        logits = jnp.moveaxis(jax.lax.map(one, jnp.moveaxis(keys, 2, 0), batch_size=BLOCK), 0, -1)  # B K G S
        others = (tokens.positions >= self.sinks)[:, :, None]
        weights = jax.nn.softmax(jnp.where(others, logits, jnp.finfo(jnp.float32).min), axis=-1).mean(2)
        size = jnp.linalg.norm(apart(tokens.v, heads.k.shape[2]).astype(jnp.float32), axis=-1)
        return jnp.where(tokens.positions < self.sinks, jnp.inf, (weights + self.epsilon) * size)

    def _expected_queries(self, heads: Heads, view: View) -> tuple[Float[Array, "B K G H"], Float[Array, "B K G H H"]]:
        """Returns the mean and the covariance of the queries to come, by those of a text."""
        batch, text, num_heads, size = heads.q.shape
        number = jnp.arange(text)[None]
        positions = view.lengths.seen[:, None] + number
        counts = (number < heads.lengths[:, None]) & (positions >= self.sinks)
        block = math.gcd(BLOCK, text)
        parts = tuple(x.reshape(batch, -1, block, *x.shape[2:]).swapaxes(0, 1) for x in (heads.q, positions, counts))

        def over_all(of: Callable[[jax.Array], jax.Array], mean: jax.Array | float, *shape: int) -> jax.Array:
            """Returns the mean over the queries of what `of` makes of a block, less `mean`; two passes lose no digits."""

            def add(total: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                q, where, counted = part
                q = view.rerotate(q.astype(jnp.float32), -where) - mean
                return total + of(jnp.where(counted[..., None, None], q, 0)), None

            total = jax.lax.scan(add, jnp.zeros((batch, num_heads, *shape)), parts)[0]
            return total / jnp.maximum(counts.sum(1, dtype=jnp.float32), 1).reshape(-1, 1, *(1,) * len(shape))

        mean = over_all(lambda q: q.sum(1), 0.0, size)
        covariance = over_all(lambda q: EINSUM("btni,btnj->bnij", q, q), mean[:, None], size, size)
        # A rotation is linear: what it makes of a basis is all of it. The mean rotation, turned to where the text ends.
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
    """Returns the logarithm of the mean of exp(score) of a key for each query head over Gaussian queries, in fp32.

    Exact without a soft cap; with one, to first order around the score of the mean.
    """
    scores = scoring(EINSUM("bkh,bkgh->bkg", keys, mean))
    variance = scoring.scale**2 * EINSUM("bki,bkgij,bkj->bkg", keys, covariance, keys)
    return scores + jnp.square(scoring.slope(scores)) * variance / 2
