"""vAttention (arXiv 2510.05688): the exact top tokens, and a random sample of the others as large as an error bound asks for.

`--cache vattention`, an oracle. Scores are f32[B, K, G, S].
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.bases.oracle import Oracle
from icejax.cache.protocol import check_dense_layers
from icejax.checks.numbers import integer, number
from icejax.ops.topk import largest


@dataclass(frozen=True)
class VAttention(Oracle):
    """vAttention over exact scores: every query head attends to sinks, window, its top tokens and a sample of the others.

    A first draw of tokens estimates the variance of their weights, which determines the sample size: the sum of all weights is
    then wrong by more than a share `epsilon` with a probability near `delta`, if the budget allows the size. The sample is
    drawn separately, and its weights are divided by the share of tokens drawn. As in the authors' code the draws include top
    tokens: these are attended to once, and count in the estimate of the sum. In their code a token may be drawn twice but
    weighs once, which is too little; here, as in the paper, tokens are drawn without replacement. Their sample is as large as
    the bound asks for, their first draw is a share of the text, and sinks and window are 128 each. The draw depends on seed,
    position and head alone: it is the same in all layers, and for a row in any batch.

    Attributes:
        budget: most tokens attended to per query head and layer, sinks and window included.
        sinks: first tokens, which are always attended to.
        window: newest tokens, which are always attended to.
        top: tokens of highest score between sinks and window, which are attended to; None: half of the budget besides sinks and
            window; the sample has the rest.
        base: size of the first draw and least size of the sample, as a share of the largest sample.
        epsilon: relative error of the sum of weights that the sample is meant not to exceed.
        delta: probability of a sum that is too small by more than `epsilon`, and of one that is too large by more.
        seed: seed of the draws.
        dense_layers: first layers that keep the full cache; None: 2 for models of 16 layers and more, else 0.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    sinks: int = 4
    window: int = 16
    top: int | None = None
    base: float = 0.25
    epsilon: float = 0.05
    delta: float = 0.05
    seed: int = 0
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        integer("sinks", self.sinks, least=0, most=2**20)
        integer("window", self.window, most=2**20)
        integer("budget", self.budget, least=self.sinks + self.window + 3)
        if self.top is not None:
            integer("top", self.top, most=self._left - 2)
        number("base", self.base, least=0, most=1)
        number("epsilon", self.epsilon, least=0, most=1, above=True)
        number("delta", self.delta, least=0, most=0.49, above=True)
        integer("seed", self.seed, least=0)
        check_dense_layers(self.dense_layers)

    @property
    def _left(self) -> int:
        return self.budget - self.sinks - self.window

    @property
    def _top(self) -> int:
        return self._left // 2 if self.top is None else self.top

    def weighed(self, scores: Float[Array, "B K G S"], newest: Int[Array, " B"]) -> Float[Array, "B K G S"]:
        batch, heads, group, slots = scores.shape
        slot, end = jnp.arange(slots)[None, None, None], (newest + 1 - self.window)[:, None, None, None]
        between, count = (slot >= self.sinks) & (slot < end), jnp.maximum(end - self.sinks, 0)
        draws = self.draws(newest, heads * group, slots).reshape(batch, 2, *scores.shape[1:])
        max_sample = self._left - self._top
        min_sample = jnp.minimum(max(2, int(self.base * max_sample)), count)

        def top_between(worth: jax.Array, room: jax.Array, limit: int) -> jax.Array:
            return between & largest(jnp.where(between, worth, -jnp.inf), jnp.broadcast_to(room, scores.shape[:3]), most=limit)

        exact = ~between | top_between(scores, jnp.int32(self._top), self._top)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        mean, variance = _moments(weights, top_between(draws[:, 0], min_sample[..., 0], max(2, max_sample)))
        total = jnp.where(exact, weights, 0).sum(-1, keepdims=True) + mean * count.astype(jnp.float32)
        allowed = self.epsilon * total / -NormalDist().inv_cdf(self.delta)  # allowed standard deviation of the sum
        wanted = jnp.square(count.astype(jnp.float32) / allowed) * variance
        wanted = jnp.clip(jnp.minimum(wanted, max_sample).astype(jnp.int32), min_sample, jnp.minimum(max_sample, count))
        share = wanted.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
        return jnp.where(
            exact, scores, jnp.where(top_between(draws[:, 1], wanted[..., 0], max_sample), scores - jnp.log(share), -jnp.inf)
        )

    def draws(self, newest: Int[Array, " B"], heads: int, slots: int) -> Float[Array, "B {2*heads} {slots}"]:
        """Returns random numbers from 0 to 1 for every slot, for the first draw of every query head and then for the second."""

        def uniform(position: jax.Array, draw: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), position), draw)
            return jax.random.uniform(key, (slots,))

        of_row = jax.vmap(uniform, in_axes=(None, 0))
        return jax.vmap(of_row, in_axes=(0, None))(newest, jnp.arange(2 * heads))


def _moments(x: Float[Array, "*R n"], sampled: Bool[Array, "*R n"]) -> tuple[Float[Array, "*R 1"], Float[Array, "*R 1"]]:
    """Returns the mean and variance of x, estimated from the `sampled` values; 0 where none is sampled."""
    count = sampled.sum(-1, keepdims=True).astype(jnp.float32)
    mean = jnp.where(sampled, x, 0).sum(-1, keepdims=True) / jnp.maximum(count, 1)
    return mean, jnp.where(sampled, jnp.square(x - mean), 0).sum(-1, keepdims=True) / jnp.maximum(count - 1, 1)
