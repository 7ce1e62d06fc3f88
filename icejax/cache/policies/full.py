"""The exact caches: every token on the device, or the newest tokens in a ring.

The registry offers `Full` as `--cache full`; `Ring` serves sliding-window layers. Slots are [B K, S, H].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from icejax.cache.bases.all_tokens import AllTokens, TokenState, decode_in_slot, empty_slots, slot_report
from icejax.cache.bases.ring import ring_positions, with_new_tokens
from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import Attended, Scoring, attend_all, causal_with_lse, merge_by_lse
from icejax.ops.pages.channel_scaling import query_squares
from icejax.ops.slots import by_head, merge_heads, per_head, split_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MovableState(TokenState):
    """The state of a cache whose tokens can move to another one.

    Attributes:
        squares: squares of the queries of all tokens so far, as `query_squares` returns them.
    """

    squares: jax.Array  # f32[B, K, H]

    def heads(self, spec: CacheSpec, lengths: Int[Array, " B"], scoring: Scoring, *, padded: int) -> Heads:
        """Returns the heads with equal queries whose squares are those of all queries: no cache keeps the queries."""
        heads = super().heads(spec, lengths, scoring, padded=padded)
        size = jnp.sqrt(self.squares / lengths.astype(jnp.float32)[:, None, None])[:, None, :, None]  # B 1 K 1 H
        shape = (*heads.q.shape[:2], spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, heads.q.shape[3])
        return replace(heads, q=jnp.broadcast_to(size, shape).reshape(heads.q.shape).astype(heads.q.dtype))


@dataclass(frozen=True)
class Full(AllTokens):
    """Every token on the device, attended exactly: the reference for all other policies.

    Attributes:
        movable: whether the squares of queries are summed too, so that a session can move its tokens to pages
            (`session.text_cache`); a session whose first tokens stay on the device sets it, no user.
    """

    movable: bool = field(default=False, metadata={"internal": True})
    by_head = True

    def init(self, spec: CacheSpec) -> TokenState:
        state = super().init(spec)
        if not self.movable:
            return state
        return MovableState(state.k, state.v, jnp.zeros((spec.batch_size, spec.num_kv_heads, spec.head_dim)))

    def prefill(self, state: TokenState, heads: Heads, attended: Attended, view: View) -> Outcome:
        return self._counted(super().prefill(state, heads, attended, view), heads)

    def extend(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        return self._counted(super().extend(state, heads, view), heads)

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        return self._counted(super().decode(state, heads, view), heads)

    def _counted(self, outcome: Outcome, heads: Heads) -> Outcome:
        if not self.movable:
            return outcome
        squares = query_squares(heads.q, heads.lengths, kv_heads=heads.k.shape[2])
        return replace(outcome, state=replace(outcome.state, squares=outcome.state.squares + squares))


@dataclass(frozen=True)
class Ring(CachePolicy):
    """The newest `window` tokens in a ring, attended exactly: a sliding-window layer never attends to more."""

    window: int
    by_head = True

    def init(self, spec: CacheSpec) -> TokenState:
        return empty_slots(spec, min(self.window, spec.capacity))

    def prefill(self, state: TokenState, heads: Heads, attended: Attended, view: View) -> Outcome:
        position = ring_positions(heads.lengths, state.k.shape[1])
        index = jnp.maximum(position, 0)[:, :, None, None]
        filled = position[:, :, None, None] >= 0
        ring = state.each(lambda _, x: merge_heads(by_head(jnp.where(filled, jnp.take_along_axis(x, index, axis=1), 0))), heads)
        return Outcome(ring)

    def extend(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        slots, seen = state.k.shape[1], view.lengths.seen
        before, after = (ring_positions(n, slots) for n in (seen, seen + heads.lengths))
        with jax.named_scope("attend"):
            attended = attend_ring(state, heads, seen, position=before, window=self.window)
        return Outcome(state.each(lambda old, x: with_new_tokens(old, x, after - seen[:, None]), heads), attended)

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        return decode_in_slot(state, heads, slot=seen % state.k.shape[1], last=seen)

    def can_trim(self, tokens: int) -> bool:
        return tokens <= self.window  # later tokens have replaced earlier ones

    def trimmed(self, state: TokenState, tokens: Int[Array, " B"], page: Int[Array, ""]) -> TokenState:
        return state.first(tokens)

    def report(self, state: TokenState, lengths: Lengths) -> Report:
        return slot_report(state.k, lengths)


def attend_ring(
    state: TokenState, heads: Heads, seen: Int[Array, " B"], *, position: Int[Array, "B S"], window: int
) -> Attended:
    """Returns the attention of new tokens to a ring and to each other, f32[B, T, N, Hv] and f32[B, T, N].

    Args:
        position: position of the token in each slot; below 0 for an empty slot.
        window: newest tokens that a query sees, itself included.
    """
    num_heads = heads.k.shape[2]
    keys, values = (split_heads(x, num_heads) for x in (state.k, state.values))
    query_positions = seen[:, None] + jnp.arange(heads.q.shape[1])[None, :]
    near = query_positions[:, :, None] - position[:, None, :] < window
    # A new token always sees a key, itself, so that this attention comes first in the merge.
    to_new = causal_with_lse(heads.q, heads.k, heads.v, lengths=heads.lengths, window=window, scoring=heads.scoring)
    before, lse = attend_all(heads.q, keys, values, per_head(position >= 0, num_heads), near=near, scoring=heads.scoring)
    return Attended(*merge_by_lse(*to_new, before[..., : heads.v.shape[-1]], lse))
