"""vAttention (arXiv 2510.05688): the exact top tokens, and of the others as many by chance as a bound of the error asks for."""

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
    """vAttention over exact scores: every query head attends to sinks, window, its top tokens and a sample of those between.

    A few drawn tokens tell how much weights differ; of that follows how many to draw, so that the sum of all weights is wrong
    by more than a share `epsilon` with a probability near `delta`, if the budget holds them. They are drawn anew, and each is
    weighed by one over the share that is drawn. As in its code top tokens may be drawn too, count once, and add to the estimate
    of the sum. There a token may be drawn twice and weighs once, which is too little; here, as in the paper, it is drawn once.
    There as many are drawn as the bound asks for, the first draw is a share of the text, and sinks and window are 128 each.
    What is drawn follows from seed, position and head, and is the same in all layers, whoever shares the batch.

    Attributes:
        budget: tokens attended to per query head and layer at most, sinks and window included.
        sinks: first tokens, which are attended to.
        window: newest tokens, which are attended to.
        top: tokens of highest score between them, which are attended to; None: half of what the budget leaves for them and the
            sample.
        base: share of the largest sample that is drawn first, and the least that is.
        epsilon: share of the sum of weights.
        delta: how likely a sum may be that is too small by more than that, and so one that is too large.
        seed: of what is drawn.
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
        place, end = jnp.arange(slots)[None, None, None], (newest + 1 - self.window)[:, None, None, None]
        between, count = (place >= self.sinks) & (place < end), jnp.maximum(end - self.sinks, 0)
        draws = self.draws(newest, heads * group, slots).reshape(batch, 2, *scores.shape[1:])
        most = self._left - self._top
        least = jnp.minimum(max(2, int(self.base * most)), count)

        def first(worth: jax.Array, room: jax.Array, most: int) -> jax.Array:
            return between & largest(jnp.where(between, worth, -jnp.inf), jnp.broadcast_to(room, scores.shape[:3]), most=most)

        exact = ~between | first(scores, jnp.int32(self._top), self._top)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        mean, variance = _moments(weights, first(draws[:, 0], least[..., 0], max(2, most)))
        total = jnp.where(exact, weights, 0).sum(-1, keepdims=True) + mean * count.astype(jnp.float32)
        allowed = self.epsilon * total / -NormalDist().inv_cdf(self.delta)  # standard deviation of the sum
        wanted = jnp.square(count.astype(jnp.float32) / allowed) * variance
        wanted = jnp.clip(jnp.minimum(wanted, most).astype(jnp.int32), least, jnp.minimum(most, count))
        share = wanted.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
        return jnp.where(exact, scores, jnp.where(first(draws[:, 1], wanted[..., 0], most), scores - jnp.log(share), -jnp.inf))

    def draws(self, newest: Int[Array, " B"], heads: int, slots: int) -> Float[Array, "B {2*heads} {slots}"]:
        """Returns numbers from 0 to 1 for the first draw and for the second, of every query head and slot."""

        def one(position: jax.Array, number: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), position), number)
            return jax.random.uniform(key, (slots,))

        of_row = jax.vmap(one, in_axes=(None, 0))
        return jax.vmap(of_row, in_axes=(0, None))(newest, jnp.arange(2 * heads))


def _moments(x: Float[Array, "*R n"], some: Bool[Array, "*R n"]) -> tuple[Float[Array, "*R 1"], Float[Array, "*R 1"]]:
    """Returns mean and variance of what some values are drawn from; 0 where there is none."""
    count = some.sum(-1, keepdims=True).astype(jnp.float32)
    mean = jnp.where(some, x, 0).sum(-1, keepdims=True) / jnp.maximum(count, 1)
    return mean, jnp.where(some, jnp.square(x - mean), 0).sum(-1, keepdims=True) / jnp.maximum(count - 1, 1)
