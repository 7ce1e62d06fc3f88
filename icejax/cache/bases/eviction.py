"""Base of the eviction policies: some tokens stay in slots on the device, all others are forgotten.

Called by the layer walk through `CachePolicy`. Keys are [B K, S, H], positions and scores [B, K, S].
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.checks.numbers import LARGEST
from icejax.ops.attention.dense import EINSUM, Attended, attend_all, causal_with_lse, masked_scores, merge_by_lse
from icejax.ops.slots import append_apart, by_head, merge_heads, per_head, split_heads
from icejax.ops.topk import largest

NO_TOKEN = -1
ScoreGroup = Literal["mean", "max", "sum"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Slots with tokens; each KV head may keep different tokens.

    Attributes:
        k, v: keys (after RoPE) and values, also of a latent layer; rows and KV heads in one axis as in `TokenState`; 0 in an
            empty slot.
        positions: positions of the tokens; NO_TOKEN in an empty slot.
        scores: scores that the policy gave the tokens; 0 in an empty slot.
        room: slots that a KV head may use.
    """

    k: jax.Array  # dtype[B K, S, H]
    v: jax.Array  # dtype[B K, S, Hv]
    positions: jax.Array  # i32[B, K, S]
    scores: jax.Array  # f32[B, K, S]
    room: jax.Array  # i32[B, K]

    @property
    def there(self) -> Bool[Array, "B K S"]:
        """Mask of the slots that hold a token."""
        return self.positions != NO_TOKEN

    def at(self, indices: Int[Array, "B K S"]) -> Slots:
        """Returns the slots at `indices` of each KV head; an index past the last slot gives an empty one."""

        def gather(x: jax.Array, fill: float = 0) -> jax.Array:
            return jnp.take_along_axis(x, indices, axis=2, mode="fill", fill_value=fill)

        k, v = (
            jnp.take_along_axis(x, merge_heads(indices)[..., None], axis=1, mode="fill", fill_value=0) for x in (self.k, self.v)
        )
        return Slots(k, v, gather(self.positions, NO_TOKEN), gather(self.scores), self.room)

    def then(self, others: Slots) -> Slots:
        """Returns these slots with `others` after them."""
        k, v = (jnp.concatenate(pair, axis=1) for pair in ((self.k, others.k), (self.v, others.v)))
        pairs = (self.positions, others.positions), (self.scores, others.scores)
        return Slots(k, v, *(jnp.concatenate(pair, axis=2) for pair in pairs), self.room)


def grouped(weights: Float[Array, "B K G S"], group: ScoreGroup) -> Float[Array, "B K S"]:
    """Returns the weights combined over the query heads of a KV head."""
    return dict(mean=jnp.mean, max=jnp.max, sum=jnp.sum)[group](weights, axis=2)


def last_queries(
    heads: Heads, attended: Attended, view: View, count: int
) -> tuple[Float[Array, "B W N H"], Float[Array, "B W N"], Int[Array, "B W"]]:
    """Returns the last `count` queries of a text, their log-sum-exp and their positions.

    If a text of 2 tokens begins at position 10, its last 3 queries have the positions [-1, 10, 11]: -1 for no query.
    """
    indices = heads.lengths[:, None] - count + jnp.arange(count)[None]
    q, lse = (
        jnp.take_along_axis(x, jnp.maximum(indices, 0).reshape(*indices.shape, *(1,) * (x.ndim - 2)), axis=1)
        for x in (heads.q, attended.lse)
    )
    return q, lse, jnp.where(indices < 0, -1, view.lengths.seen[:, None] + indices)


def _text_slots(heads: Heads, view: View) -> Slots:
    """Returns the tokens of a text in slots, with scores of 0; padding becomes empty slots."""
    indices = jnp.arange(heads.k.shape[1], dtype=jnp.int32)[None, None]
    is_token = per_head(indices[0] < heads.lengths[:, None], heads.k.shape[2])
    k, v = (jnp.where(merge_heads(is_token)[..., None], merge_heads(by_head(x)), 0) for x in (heads.k, heads.v))
    positions = jnp.where(is_token, view.lengths.seen[:, None, None] + indices, NO_TOKEN)
    return Slots(k, v, positions, jnp.zeros(is_token.shape), is_token.sum(-1, dtype=jnp.int32))


class Eviction(CachePolicy):
    """Slots on the device with positions and scores, per row and KV head; a subclass supplies the scores.

    A text, the first or a later one, attends exactly to the kept tokens and to itself. Then each KV head keeps the tokens of
    highest score among both: `budget` of them, unless `budgets` is overridden. A decoded token takes a free slot, or, if the
    KV head has used its room, the slot of the token that is worth least.
    """

    evicts = True

    @abc.abstractmethod
    def score(self, tokens: Slots, heads: Heads, attended: Attended, view: View) -> Float[Array, "B K S"]:
        """Returns the fp32 scores of all tokens after a text.

        Args:
            tokens: the kept tokens, then the text's tokens; empty slots stand at both ends. Positions rise, except where a
                decoded token replaced an evicted one.
            heads, attended: the text's queries, keys and values, and its attention.
        """

    on_top: bool = False  # whether decoded tokens take slots beyond the budget, so that no token leaves for them

    def most(self, kv_heads: int) -> int:
        """Returns the largest budget that one KV head may have, in a layer of `kv_heads`."""
        del kv_heads
        return self.budget

    def budgets(self, tokens: Slots) -> Int[Array, "B K"]:
        """Returns how many tokens each KV head keeps after a text, at most `most`; `tokens` have their new scores."""
        shape = tokens.positions.shape[:2]
        return jnp.full(shape, min(self.most(shape[1]), LARGEST), jnp.int32)

    def worth(self, tokens: Slots) -> Float[Array, "B K S"]:
        """Returns the worth of tokens: the token of least worth is evicted first. Default: the scores."""
        return tokens.scores

    def update(self, tokens: Slots, weights: Float[Array, "B K G S"]) -> Float[Array, "B K S"]:
        """Returns the fp32 scores after a decoded token, given its attention weights. Default: the old scores."""
        del weights
        return tokens.scores

    def keys(self, tokens: Slots, view: View) -> Float[Array, "R S H"]:
        """Returns the keys that queries attend to. Default: the keys as stored."""
        del view
        return tokens.k

    def num_slots(self, spec: CacheSpec) -> int:
        """Returns the number of slots per KV head."""
        return min(self.most(spec.num_kv_heads) + (spec.new_capacity if self.on_top else 0), spec.capacity)

    def init(self, spec: CacheSpec) -> Slots:
        shape = (spec.batch_size, spec.num_kv_heads, self.num_slots(spec))
        k, v = (jnp.zeros((shape[0] * shape[1], shape[2], size), spec.dtype) for size in (spec.head_dim, spec.value_dim))
        return Slots(k, v, jnp.full(shape, NO_TOKEN, jnp.int32), jnp.zeros(shape), jnp.full(shape[:2], shape[2], jnp.int32))

    def prefill(self, state: Slots, heads: Heads, attended: Attended, view: View) -> Outcome:
        size = state.positions.shape[2]
        return Outcome(self._keep_best(_text_slots(heads, view), heads, attended, view, size=size))

    def extend(self, state: Slots, heads: Heads, view: View) -> Outcome:
        with jax.named_scope("attend"):
            to_text = causal_with_lse(heads.q, heads.k, heads.v, lengths=heads.lengths, window=None, scoring=heads.scoring)
            keys, values = (split_heads(x, heads.k.shape[2]) for x in (self.keys(state, view), state.v))
            to_slots = attend_all(heads.q, keys, values, state.there, scoring=heads.scoring)
            attended = Attended(*merge_by_lse(*to_text, *to_slots))
        with jax.named_scope("evict"):
            # Moves empty slots from the end to the front, so that the text follows the earlier tokens directly.
            size = state.positions.shape[2]
            source = jnp.arange(size)[None, None] - (~state.there).sum(-1)[..., None]
            tokens = state.at(jnp.where(source < 0, size, source)).then(_text_slots(heads, view))
        return Outcome(self._keep_best(tokens, heads, attended, view, size=size), attended)

    def _keep_best(self, tokens: Slots, heads: Heads, attended: Attended, view: View, *, size: int) -> Slots:
        """Returns the tokens to keep in `size` slots, in their old order, empty slots last; `tokens` end with a new text."""
        with jax.named_scope("evict"):
            count = tokens.positions.shape[2]
            lowest = jnp.finfo(jnp.float32).min
            tokens = replace(tokens, scores=jnp.maximum(self.score(tokens, heads, attended, view), lowest))
            budgets = self.budgets(tokens)
            worth = jnp.where(tokens.there, self.worth(tokens), -jnp.inf)
            keep = largest(worth, jnp.minimum(budgets, size), most=min(self.most(heads.k.shape[2]), size)) & (worth > -jnp.inf)
            indices = jax.vmap(jax.vmap(lambda x: jnp.nonzero(x, size=size, fill_value=count)[0]))(keep)
            return replace(tokens.at(indices), room=jnp.full_like(budgets, size) if self.on_top else budgets)

    def appended(self, state: Slots, heads: Heads, view: View) -> Slots:
        """Returns the slots with a decoded token, in a free slot or, without room, in the slot of the token of least worth."""
        with jax.named_scope("append"):
            empty = jnp.where(state.there.sum(-1) < state.room, -jnp.inf, jnp.inf)[..., None]
            slot = jnp.argmin(jnp.where(state.there, self.worth(state), empty), axis=2).astype(jnp.int32)
            is_new = jnp.arange(state.positions.shape[2])[None, None] == slot[..., None]
            return Slots(
                append_apart(state.k, heads.k[:, 0], slot),
                append_apart(state.v, heads.v[:, 0], slot),
                jnp.where(is_new, view.lengths.seen[:, None, None], state.positions),
                jnp.where(is_new, 0, state.scores),
                state.room,
            )

    def decode(self, state: Slots, heads: Heads, view: View) -> Outcome:
        state = self.appended(state, heads, view)
        with jax.named_scope("attend"):
            mask = merge_heads(state.there)[:, None]
            scores = masked_scores(merge_heads(heads.by_group()), self.keys(state, view), mask, scoring=heads.scoring)
            highest = scores.max(-1, keepdims=True)
            weights = jnp.exp(scores - highest)
            total = weights.sum(-1, keepdims=True)
            weights /= total
            out = EINSUM("rgs,rsh->rgh", weights.astype(state.v.dtype), state.v)
            lse = (jnp.log(total) + highest).reshape(heads.q.shape[:3])
        with jax.named_scope("evict"):
            weights = weights.reshape(*state.positions.shape[:2], *weights.shape[1:])
            state = replace(state, scores=jnp.where(state.there, self.update(state, weights), 0))
        attended = Attended(out.reshape(*heads.q.shape[:3], -1).astype(heads.q.dtype), lse)
        tokens = state.there.sum(-1).mean(1)
        return Outcome(state, attended, tokens=jnp.stack([tokens, tokens]))

    def report(self, state: Slots, lengths: Lengths) -> Report:
        described = state.positions.nbytes + state.scores.nbytes + state.room.nbytes
        return Report(None, state.there.sum((1, 2)), state.positions[0].size, described)
