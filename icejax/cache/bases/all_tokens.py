"""What exact caches and oracles share: keys and values of every token, in slots on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from icejax.cache.protocol import CachePolicy, Heads, Lengths, Outcome, Report, View
from icejax.cache.sizes import CacheSpec
from icejax.ops.attention.dense import Attended, attend_all, attend_with_lse, causal_with_lse, merge_by_lse
from icejax.ops.slots import apart, append, by_head, joined, per_head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenState:
    """Keys (after RoPE) and values of every slot; slots without a token are zero.

    Of a latent layer there are keys alone, which stand for the values too: what is attended to of them is cut to these.
    Rows and KV heads in one axis: XLA:CPU would copy all slots in every step if they were joined for the attention.
    """

    k: jax.Array  # dtype[B K, S, H]
    v: jax.Array | None  # dtype[B K, S, Hv]

    @property
    def values(self) -> Float[Array, "R S _"]:
        """The values, or what begins with them."""
        return self.k if self.v is None else self.v

    def each(self, made: Callable[[jax.Array, jax.Array], jax.Array], heads: Heads) -> TokenState:
        """Returns what is made of the slots' keys and those of `heads`, and so of values that have slots."""
        return TokenState(made(self.k, heads.k), None if self.v is None else made(self.v, heads.v))


def empty_slots(spec: CacheSpec, slots: int) -> TokenState:
    k, *v = (jnp.zeros((spec.batch_size * spec.num_kv_heads, slots, size), spec.dtype) for size in spec.planes)
    return TokenState(k, v[0] if v else None)


def attend_extended(state: TokenState, heads: Heads, lengths: Lengths, *, position: jax.Array, window: int | None) -> Attended:
    """Returns the attention of new tokens to the slots, which hold the tokens at `position` [B, S], and to themselves."""
    there = (position >= 0) & (position < lengths.seen[:, None])
    heads_of = heads.k.shape[2]
    keys, values = (apart(x, heads_of) for x in (state.k, state.values))
    mask = per_head(there, heads_of)
    distance = None
    if window is not None:
        asking = lengths.seen[:, None] + jnp.arange(heads.q.shape[1])[None, :]
        distance = asking[:, :, None] - position[:, None, :] < window
    with jax.named_scope("attend"):
        # The new tokens always see one key, so they come first.
        own = causal_with_lse(heads.q, heads.k, heads.v, lengths=heads.lengths, window=window, scoring=heads.scoring)
        before, lse = attend_all(heads.q, keys, values, mask, near=distance, scoring=heads.scoring)
        return Attended(*merge_by_lse(*own, before[..., : heads.v.shape[-1]], lse))


def appended(
    state: TokenState, heads: Heads, *, slot: Int[Array, " B"], last: Int[Array, " B"]
) -> tuple[TokenState, Bool[Array, "R S"]]:
    """Returns the slots with a token at `slot`, and which of them hold one: those up to `last`."""
    with jax.named_scope("append"):
        state = state.each(lambda old, x: append(old, x[:, 0], slot), heads)
    return state, joined(per_head(jnp.arange(state.k.shape[1])[None, :] <= last[:, None], heads.k.shape[2]))


def decode_in_slot(state: TokenState, heads: Heads, *, slot: jax.Array, last: jax.Array) -> Outcome:
    """Appends at `slot` [B] and attends to the slots up to `last` [B]."""
    state, mask = appended(state, heads, slot=slot, last=last)
    with jax.named_scope("attend"):
        out, lse = attend_with_lse(joined(heads.by_group()), state.k, state.values, mask, scoring=heads.scoring)
        shape, out = heads.q.shape[:3], out[..., : heads.v.shape[-1]]
        attended = Attended(out.astype(heads.q.dtype).reshape(*shape, -1), lse.reshape(shape))
    tokens = mask.sum(-1).reshape(shape[0], -1).mean(1)
    return Outcome(state, attended, tokens=jnp.stack([tokens, tokens]))


def with_new_tokens(state: TokenState, heads: Heads, at: jax.Array) -> TokenState:
    """Returns the slots with new token `at` [B, S] where there is one."""
    index = jnp.clip(at, 0, heads.k.shape[1] - 1)[:, :, None, None]
    there = ((at >= 0) & (at < heads.lengths[:, None]))[:, :, None, None]

    def put(old: jax.Array, x: jax.Array) -> jax.Array:
        taken = jnp.where(there, jnp.take_along_axis(x, index, axis=1), 0)
        return jnp.where(joined(by_head(jnp.broadcast_to(there, taken.shape))), joined(by_head(taken)).astype(old.dtype), old)

    return state.each(put, heads)


def slot_report(state: TokenState, lengths: Lengths) -> Report:
    heads = len(state.k) // len(lengths.origin)
    return Report(None, heads * jnp.minimum(lengths.seen, state.k.shape[1]), heads * state.k.shape[1], 0)


@dataclass(frozen=True)
class AllTokens(CachePolicy):
    """Every token on the device, attended exactly."""

    def init(self, spec: CacheSpec) -> TokenState:
        return empty_slots(spec, spec.capacity)

    def prefill(self, state: TokenState, heads: Heads, attended: Attended, view: View) -> Outcome:
        valid = (jnp.arange(heads.k.shape[1])[None, :] < heads.lengths[:, None])[:, :, None, None]

        def put(old: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(old, joined(by_head(jnp.where(valid, x, 0))), (0, 0, 0))

        return Outcome(state.each(put, heads))

    def extend(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        slots = jnp.arange(state.k.shape[1])[None, :]
        attended = attend_extended(state, heads, view.lengths, position=slots, window=None)
        return Outcome(with_new_tokens(state, heads, slots - view.lengths.seen[:, None]), attended)

    def decode(self, state: TokenState, heads: Heads, view: View) -> Outcome:
        seen = view.lengths.seen
        return decode_in_slot(state, heads, slot=seen, last=seen)

    def report(self, state: TokenState, lengths: Lengths) -> Report:
        return slot_report(state, lengths)
