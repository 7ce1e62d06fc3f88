"""Policies that keep some tokens on the device and forget the others."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.policy import CachePolicy, CacheSpec, Heads, Lengths, Outcome, Report, View
from icejax.cache.slots import append_apart, by_head, joined
from icejax.ops.attention import EINSUM, Attended, attend_all, causal_with_lse, masked_scores, merge_by_lse

NO_TOKEN = -1
Group = Literal["mean", "max", "sum"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Tokens of every KV head, of which each may keep others.

    Attributes:
        k, v: keys (after RoPE) and values; 0 in an empty slot.
        positions: of the tokens; NO_TOKEN in an empty slot.
        scores: the tokens of lowest score leave first.
    """

    k: jax.Array  # dtype[B, K, S, H]
    v: jax.Array  # dtype[B, K, S, H]
    positions: jax.Array  # i32[B, K, S]
    scores: jax.Array  # f32[B, K, S]

    @property
    def there(self) -> Bool[Array, "B K S"]:
        """Which slots hold a token."""
        return self.positions != NO_TOKEN

    def at(self, indices: Int[Array, "B K S"]) -> Slots:
        """Returns the slots at `indices` of each KV head."""

        def taken(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, indices.reshape(*indices.shape, *(1,) * (x.ndim - 3)), axis=2)

        return jax.tree.map(taken, self)


def grouped(weights: Float[Array, "B K G S"], group: Group) -> Float[Array, "B K S"]:
    """Returns what the query heads of a KV head agree on."""
    return dict(mean=jnp.mean, max=jnp.max, sum=jnp.sum)[group](weights, axis=2)


class Eviction(CachePolicy):
    """Slots on the device with positions and scores, per row and KV head.

    A text, the first or a later one, attends exactly to what was kept before it and to itself; then the `budget` tokens of
    highest score stay, of both. A decoded token takes a free slot, or that of the lowest score.
    """

    @abc.abstractmethod
    def num_slots(self, spec: CacheSpec) -> int:
        """Returns how many slots there are per KV head."""

    @abc.abstractmethod
    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        """Returns the fp32 scores of all tokens after a text, in order of position; empty slots come last.

        Args:
            tokens: those kept before, and those of the text, which are the last ones.
            heads, attended: of the text.
        """

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        """Returns the fp32 scores after a decoded token, by what its attention weighed the slots."""
        del weights
        return tokens.scores

    def keys(self, tokens: Slots, view: View) -> Float[Array, "B K S H"]:
        """Returns the keys that are attended to."""
        del view
        return tokens.k

    def init(self, spec: CacheSpec) -> Slots:
        shape = (spec.batch_size, spec.num_kv_heads, self.num_slots(spec))
        nothing = jnp.zeros((*shape, spec.head_dim), spec.dtype)
        return Slots(nothing, nothing, jnp.full(shape, NO_TOKEN, jnp.int32), jnp.zeros(shape))

    def prefill(self, state: Slots, heads: Heads, attended: Attended, view: View) -> Outcome:
        return Outcome(self._kept(state, heads, attended, view))

    def extend(self, state: Slots, heads: Heads, view: View) -> Outcome:
        with jax.named_scope("attend"):
            own = causal_with_lse(heads.q, heads.k, heads.v, lengths=heads.new, window=None, scale=heads.scale)
            before = attend_all(heads.q, self.keys(state, view), state.v, state.there, scale=heads.scale)
            attended = Attended(*merge_by_lse(*own, *before))
        return Outcome(self._kept(state, heads, attended, view), attended)

    def _kept(self, state: Slots, heads: Heads, attended: Attended, view: View) -> Slots:
        """Returns what stays of the slots and of a text behind them, in order of position, in as many slots as before."""
        size = state.positions.shape[2]
        with jax.named_scope("evict"):
            number = jnp.arange(heads.k.shape[1], dtype=jnp.int32)[None, None]
            new = jnp.broadcast_to(number < heads.new[:, None, None], by_head(heads.k).shape[:3])
            k, v = (jnp.where(new[..., None], by_head(x), 0).astype(state.k.dtype) for x in (heads.k, heads.v))
            positions = jnp.where(new, view.lengths.seen[:, None, None] + number, NO_TOKEN)
            text = Slots(k, v, positions, jnp.zeros(new.shape))
            tokens = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), state, text)
            tokens = tokens.at(jnp.argsort(jnp.where(tokens.there, tokens.positions, jnp.iinfo(jnp.int32).max), axis=2))
            scores = jnp.maximum(self.score(tokens, heads, attended, view), jnp.finfo(jnp.float32).min)
            tokens = replace(tokens, scores=scores)
            # The earlier one of equal scores stays; sorted again, they are in order of position.
            best = jax.lax.top_k(jnp.where(tokens.there, scores, -jnp.inf), min(self.budget, size))[1]
            kept = tokens.at(jnp.sort(best, axis=2))
            return jax.tree.map(
                lambda x, empty: jax.lax.dynamic_update_slice(empty, x, (0,) * x.ndim), kept, self._empty(state)
            )

    def _empty(self, state: Slots) -> Slots:
        nothing = jax.tree.map(jnp.zeros_like, state)
        return replace(nothing, positions=jnp.full_like(state.positions, NO_TOKEN))

    def decode(self, state: Slots, heads: Heads, view: View) -> Outcome:
        with jax.named_scope("append"):
            slot = jnp.argmin(jnp.where(state.there, state.scores, -jnp.inf), axis=2).astype(jnp.int32)
            here = jnp.arange(state.positions.shape[2])[None, None] == slot[..., None]
            state = Slots(
                append_apart(state.k, heads.k[:, 0], slot),
                append_apart(state.v, heads.v[:, 0], slot),
                jnp.where(here, view.lengths.seen[:, None, None], state.positions),
                jnp.where(here, 0, state.scores),
            )
        with jax.named_scope("attend"):
            mask = joined(state.there)[:, None]
            scores = masked_scores(*map(joined, (heads.by_group(), self.keys(state, view))), mask, scale=heads.scale)
            highest = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - highest)
            total = weights.sum(-1, keepdims=True)
            weights /= total
            out = EINSUM("rgs,rsh->rgh", weights.astype(state.v.dtype), joined(state.v))
            lse = (jnp.log(total) + highest).reshape(heads.q.shape[:3])
        with jax.named_scope("evict"):
            weights = weights.reshape(*state.positions.shape[:2], *weights.shape[1:])
            state = replace(state, scores=self.update(state, weights))
        return Outcome(state, Attended(out.reshape(heads.q.shape).astype(heads.q.dtype), lse))

    def report(self, state: Slots, lengths: Lengths) -> Report:
        return Report(None, state.there.sum((1, 2)), state.positions.nbytes + state.scores.nbytes)
