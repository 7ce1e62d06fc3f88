"""Base of the exact caches and the oracles: keys and values of tokens in slots on the device.

`policies/full.py` and `bases/oracle.py` build on it. Slots are [B K, S, H]; outside a ring, slot s holds position s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import Attended, Scoring, attend_first, attend_slots
from icejax.ops.slots import append, append_text, by_head, first_slots, merge_heads, per_head, split_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenState:
    """Keys (after RoPE) and values of every slot; slots without a token are zero.

    A latent layer keeps keys alone: their first channels are the values, to which attention outputs are cut.
    Rows and KV heads share one axis: if a step joined two axes for the attention, XLA:CPU would copy all slots in every step.
    """

    k: jax.Array  # dtype[B K, S, H]
    v: jax.Array | None  # dtype[B K, S, Hv]

    @property
    def values(self) -> Float[Array, "R S _"]:
        """The values; in a latent layer the keys, whose first channels are the values."""
        return self.k if self.v is None else self.v

    def each(self, made: Callable[[jax.Array, jax.Array], jax.Array], heads: Heads) -> TokenState:
        """Returns the state with `made(slots, new tokens of heads)` for keys and, where the state has values, for values."""
        return replace(self, k=made(self.k, heads.k), v=None if self.v is None else made(self.v, heads.v))

    def first(self, count: Int[Array, " B"]) -> TokenState:
        """Returns the state of rows whose slot s holds position s, with their first `count` tokens alone."""
        # Later slots would be masked, but whoever stores the row would store them too.
        return replace(self, k=first_slots(self.k, count), v=None if self.v is None else first_slots(self.v, count))

    def heads(self, spec: CacheSpec, lengths: Int[Array, " B"], scoring: Scoring, *, padded: int) -> Heads:
        """Returns the tokens of slots by position as heads of a prompt, for the `prefill` of another policy; queries are 0.

        Args:
            spec: the sizes of this cache.
            lengths: tokens of each row.
            padded: tokens of the padded prompt.
        """

        def by_token(x: jax.Array) -> jax.Array:
            x = split_heads(x, spec.num_kv_heads).swapaxes(1, 2)[:, :padded]
            return jnp.pad(x, [(0, 0), (0, padded - x.shape[1]), (0, 0), (0, 0)])

        k, v = by_token(self.k), by_token(self.values)[..., : spec.value_dim]
        return Heads(jnp.zeros((*k.shape[:2], spec.num_heads, k.shape[3]), k.dtype), k, v, lengths, scoring)


def empty_slots(spec: CacheSpec, slots: int) -> TokenState:
    """Returns `slots` empty slots per row and KV head."""
    k, *v = (jnp.zeros((spec.batch_size * spec.num_kv_heads, slots, size), spec.dtype) for size in spec.planes)
    return TokenState(k, v[0] if v else None)


def appended(
    state: TokenState, heads: Heads, *, slot: Int[Array, " B"], last: Int[Array, " B"]
) -> tuple[TokenState, Bool[Array, "R S"]]:
    """Returns the state with the new token in `slot`, and the mask of the slots up to `last`, which hold tokens."""
    with jax.named_scope("append"):
        state = state.each(lambda old, x: append(old, x[:, 0], slot), heads)
    return state, merge_heads(per_head(jnp.arange(state.k.shape[1])[None, :] <= last[:, None], heads.k.shape[2]))


def decode_in_slot(state: TokenState, heads: Heads, *, slot: jax.Array, last: jax.Array) -> Outcome:
    """Appends the new token at `slot` i32[B] and attends to the slots up to `last` i32[B]."""
    state, mask = appended(state, heads, slot=slot, last=last)
    with jax.named_scope("attend"):
        last = jnp.repeat(last, heads.k.shape[2])  # of each row and KV head
        out, lse = attend_first(merge_heads(heads.by_group()), state.k, state.values, last, scoring=heads.scoring)
        shape, out = heads.q.shape[:3], out[..., : heads.v.shape[-1]]
        attended = Attended(out.astype(heads.q.dtype).reshape(*shape, -1), lse.reshape(shape))
    tokens = mask.sum(-1).reshape(shape[0], -1).mean(1)
    return Outcome(state, attended, tokens=jnp.stack([tokens, tokens]))


def slot_report(slots: Shaped[Array, "R S *_"], lengths: Lengths) -> Report:
    """Returns the report of a policy whose tokens are all in slots, as `slots` are."""
    heads = len(slots) // len(lengths.origin)
    return Report(None, heads * jnp.minimum(lengths.seen, slots.shape[1]), heads * slots.shape[1], 0)


@dataclass(frozen=True)
class AllTokens(CachePolicy):
    """Every token on the device, attended exactly; a subclass may attend to fewer."""

    def init(self, spec: CacheSpec) -> TokenState:
        return empty_slots(spec, spec.capacity)

    def prefill(self, state: TokenState, heads: Heads, attended: Attended, view: View) -> Outcome:
        valid = (jnp.arange(heads.k.shape[1])[None, :] < heads.lengths[:, None])[:, :, None, None]

        def put(old: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(old, merge_heads(by_head(jnp.where(valid, x, 0))), (0, 0, 0))

        return Outcome(state.each(put, heads))

    def extend(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        with jax.named_scope("append"):
            state = state.each(lambda old, x: append_text(old, x, seen, heads.lengths), heads)
        with jax.named_scope("attend"):
            keys, values = (split_heads(x, heads.k.shape[2]) for x in (state.k, state.values))
            sizes = dict(seen=seen, lengths=heads.lengths, window=None, scoring=heads.scoring)
            out, lse = attend_slots(heads.q, keys, values, **sizes)
        return Outcome(state, Attended(out[..., : heads.v.shape[-1]], lse))

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        return decode_in_slot(state, heads, slot=seen, last=seen)

    def can_trim(self, tokens: int) -> bool:
        return True

    def trimmed(self, state: TokenState, tokens: Int[Array, " B"], page: Int[Array, ""]) -> TokenState:
        return state.first(tokens)

    def report(self, state: TokenState, lengths: Lengths) -> Report:
        return slot_report(state.k, lengths)
