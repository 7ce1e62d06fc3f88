"""ReST-KV (ICLR 2026, arXiv 2605.08840): keeps the tokens whose removal would change a layer's output most (`--cache restkv`).

Attention weights are [B, K, G, S], scores f32[B, K, S].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.cache.bases.eviction import Eviction, Slots, last_queries
from icejax.cache.protocol import Heads, View
from icejax.checks.errors import InputError
from icejax.checks.numbers import integer, number
from icejax.ops.attention.dense import BLOCK, EINSUM, Attended, Scoring, masked_scores
from icejax.ops.attention.recent_attention import recent_attention_sums
from icejax.ops.pooling import shifted_mean
from icejax.ops.slots import merge_heads, split_heads


@dataclass(frozen=True)
class ReSTKV(Eviction):
    """ReST-KV: keeps the last tokens of a text, and the earlier tokens whose removal would change the output most.

    Decoded tokens stay. With a, a moving average of the last queries' weights over the earlier tokens, and o = sum a v, a
    token's score is a / (1 - a) ||W_o (o - v)||^tau, pooled over neighbours. The neighbours are shifted against the movement of
    the query head's attention within the window, by one place for every `scale` tokens; a large shift pools more of them. The
    authors' code keeps tokens per query head; here per KV head, by the mean of the pooled scores. For a movement to the right
    by a multiple of `scale`, 0 included, their code pools one place further right.

    Attributes:
        budget: tokens kept per KV head and layer after a text; decoded tokens come on top.
        window: last tokens of a text, which stay and whose queries score the others.
        kernel: least number of neighbouring tokens over which scores are pooled, an odd number; 21 in the authors' scripts for
            RULER.
        alpha: weight of a newer query in the moving average.
        tau: exponent of the output's change; 0: scores are of attention alone.
        scale: tokens by which attention has to move for a shift of one place.

    Raises:
        InputError: an option is out of range.
    """

    budget: int = 256
    window: int = 32
    kernel: int = 5
    alpha: float = 0.3
    tau: float = 1.0
    scale: int = 2000

    def __post_init__(self) -> None:
        integer("window", self.window, most=2**20)
        integer("budget", self.budget, least=self.window + 1)
        integer("kernel", self.kernel, most=1023)
        if self.kernel % 2 == 0:
            raise InputError(f"kernel must be an odd number, got {self.kernel}")
        number("alpha", self.alpha, least=0, most=1, above=True)
        number("tau", self.tau, least=0, most=16)
        integer("scale", self.scale)

    on_top = True

    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        q, lse, query_positions = last_queries(heads, attended, view, self.window)
        keys, values = (split_heads(x, heads.k.shape[2]) for x in (self.keys(tokens, view), tokens.v))
        count = jnp.minimum(heads.lengths, self.window)[:, None].astype(jnp.float32)
        age = jnp.arange(self.window, dtype=jnp.float32)[None, ::-1]
        # The moving average begins with the oldest query. lse - log(share) multiplies a query's weights by its share.
        share = jnp.where(age == count - 1, 1.0, self.alpha) * (1 - self.alpha) ** age
        lse, options = (
            lse - jnp.log(share)[..., None],
            dict(asking=query_positions, positions=tokens.positions, scoring=heads.scoring),
        )
        first = (view.lengths.seen + jnp.maximum(heads.lengths - self.window, 0))[:, None, None]
        inside = tokens.there & (tokens.positions < first)
        weights = jnp.where(inside[:, :, None], recent_attention_sums(q, lse, keys, **options), 0.0)
        odds = weights / jnp.maximum(1 - weights, jnp.finfo(jnp.float32).eps)
        half = count // 2
        halves = jnp.where(age < half, -1.0, jnp.where((age >= count - half) & (age < count), 1.0, 0.0)) / jnp.maximum(half, 1)
        shift = EINSUM("bw,wbkg->bkg", halves, self._mean_places(q, keys, **options)) / self.scale
        pooled = shifted_mean(
            odds * _changes(weights, values, view) ** self.tau, inside, shift.astype(jnp.int32), kernel=self.kernel
        )
        return jnp.where(tokens.positions >= first, jnp.inf, pooled.mean(2))

    def _mean_places(
        self, q: jax.Array, keys: jax.Array, *, asking: jax.Array, positions: jax.Array, scoring: Scoring
    ) -> jax.Array:
        """Returns the mean place f32[W, B, K, G] of the `budget - window` keys with the highest scores, per query head."""
        count = min(self.budget - self.window, keys.shape[2])

        def places_of_query(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            q, position = part  # B N H, B
            seen = (positions >= 0) & (positions <= position[:, None, None])
            q = q.reshape(keys.shape[0] * keys.shape[1], -1, keys.shape[3])
            scores = masked_scores(q, merge_heads(keys), merge_heads(seen)[:, None], scoring=scoring)
            return split_heads(jax.lax.top_k(scores, count)[1].astype(jnp.float32).mean(-1), keys.shape[1])

        return jax.lax.map(places_of_query, (q.swapaxes(0, 1), asking.T))


def _changes(weights: Float[Array, "B K G S"], values: Float[Array, "B K S H"], view: View) -> Float[Array, "B K G S"]:
    """Returns ||W_o (o - v)|| for each query head's output o and each token's value v."""
    (_, kv_heads, group, _), size = weights.shape, values.shape[-1]
    none = jnp.zeros((1, size, kv_heads * group, size), values.dtype)

    def products(head: jax.Array) -> jax.Array:
        basis = none.at[:, :, head].set(jnp.eye(size, dtype=none.dtype))
        columns = view.project(basis) - view.project(none)  # the projection may add a bias
        return EINSUM("bid,bjd->ij", columns, columns)

    def squared(value: jax.Array) -> jax.Array:
        change = attended - value[:, :, None]
        return EINSUM("bkgi,kgij,bkgj->bkg", change, lengths, change)

    # The projection is linear, so that the products of a head's columns give the norm of every projected vector.
    lengths = jax.lax.map(products, jnp.arange(kv_heads * group)).reshape(kv_heads, group, size, size)
    values = values.astype(jnp.float32)
    attended = EINSUM("bkgs,bksh->bkgh", weights, values)
    squares = jax.lax.map(squared, jnp.moveaxis(values, 2, 0), batch_size=BLOCK)
    return jnp.sqrt(jnp.maximum(jnp.moveaxis(squares, 0, -1), 0))
