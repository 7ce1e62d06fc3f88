"""The exact caches: every token on the device, or the newest ones in a ring."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from icejax.cache.policy import CachePolicy, CacheSpec, Lengths, append, grouped, per_head
from icejax.ops.attention import attend, attend_all, causal_with_lse, merge_by_lse


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenState:
    """Keys (after RoPE) and values of every slot, rows and KV heads in one axis; slots without a token are zero."""

    k: jax.Array  # dtype[B K, S, H]
    v: jax.Array  # dtype[B K, S, H]


def _empty(spec: CacheSpec, slots: int) -> TokenState:
    shape = (spec.batch_size * spec.num_kv_heads, slots, spec.head_dim)
    return TokenState(jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype))


def _by_head(x: jax.Array) -> jax.Array:
    """Returns [B, S, K, H] as [B K, S, H]."""
    batch, slots, heads, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * heads, slots, size)


def _extend(state: TokenState, q, k, v, lengths: Lengths, new: jax.Array, *, position: jax.Array, window: int | None):
    """Returns the attention of new tokens to the slots, which hold the tokens at `position` [B, S], and to themselves."""
    batch, tokens, heads, size = k.shape
    keys, values = (x.reshape(batch, heads, -1, size) for x in (state.k, state.v))
    there = (position >= 0) & (position < lengths.seen[:, None])
    mask = jnp.broadcast_to(there[:, None, :], (batch, heads, there.shape[1]))
    distance = None
    if window is not None:
        asking = lengths.seen[:, None] + jnp.arange(tokens)[None, :]
        distance = asking[:, :, None] - position[:, None, :] < window
    with jax.named_scope("attend"):
        # The new tokens always see one key, so they come first.
        own = causal_with_lse(q, k, v, lengths=new, window=window)
        return merge_by_lse(*own, *attend_all(q, keys, values, mask, near=distance))[0]


def _decode(state: TokenState, q: jax.Array, k: jax.Array, v: jax.Array, *, slot: jax.Array, last: jax.Array):
    """Appends at `slot` [B] and attends to the slots up to `last` [B]."""
    heads = k.shape[1]
    with jax.named_scope("append"):
        state = TokenState(append(state.k, k, slot), append(state.v, v, slot))
    with jax.named_scope("attend"):
        mask = jnp.arange(state.k.shape[1])[None, :] <= last[:, None]
        out = attend(grouped(q, heads), state.k, state.v, per_head(mask, heads))
    return out.reshape(q.shape), state


def _newest_of(seen: jax.Array, slots: int) -> jax.Array:
    """Returns the position of the newest of `seen` [B] tokens that every slot of a ring holds; below 0: none."""
    newest = seen[:, None] - 1
    return newest - (newest - jnp.arange(slots)[None, :]) % slots


def _replaced(old: jax.Array, x: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the slots with new token `at` [B, S] of `x` [B, T, K, H] where there is one."""
    batch, tokens, heads, size = x.shape
    index = jnp.clip(at, 0, tokens - 1)[:, :, None, None]
    there = ((at >= 0) & (at < new[:, None]))[:, :, None, None]
    taken = jnp.where(there, jnp.take_along_axis(x, index, axis=1), 0)
    return jnp.where(_by_head(jnp.broadcast_to(there, taken.shape)), _by_head(taken).astype(old.dtype), old)


@dataclass(frozen=True)
class Full(CachePolicy):
    """Every token on the device, attended exactly: what all other policies are measured against."""

    def init(self, spec: CacheSpec) -> TokenState:
        return _empty(spec, spec.capacity)

    def prefill(self, state, q, k, v, lengths: Lengths, guide=None):
        valid = (jnp.arange(k.shape[1])[None, :] < lengths.prompt[:, None])[:, :, None, None]
        k, v = (_by_head(jnp.where(valid, x, 0)) for x in (k, v))
        start = (0, 0, 0)
        state = TokenState(jax.lax.dynamic_update_slice(state.k, k, start), jax.lax.dynamic_update_slice(state.v, v, start))
        return state, None, guide

    def extend(self, state, q, k, v, lengths: Lengths, new: jax.Array, pool, guide=None):
        slots = jnp.arange(state.k.shape[1])[None, :]
        out = _extend(state, q, k, v, lengths, new, position=slots, window=None)
        at = slots - lengths.seen[:, None]
        return out, TokenState(*(_replaced(old, x, at, new) for old, x in ((state.k, k), (state.v, v)))), None, guide

    def decode(self, state, q, k, v, lengths: Lengths, pool, guide=None, guess=None):
        return *_decode(state, q, k, v, slot=lengths.seen, last=lengths.seen), guide


@dataclass(frozen=True)
class Ring(CachePolicy):
    """The newest `window` tokens in a ring: all that a sliding-window layer ever sees, exactly."""

    window: int

    def init(self, spec: CacheSpec) -> TokenState:
        return _empty(spec, min(self.window, spec.capacity))

    def prefill(self, state, q, k, v, lengths: Lengths, guide=None):
        position = _newest_of(lengths.prompt, state.k.shape[1])
        index = jnp.maximum(position, 0)[:, :, None, None]
        kept = [jnp.where(position[:, :, None, None] >= 0, jnp.take_along_axis(x, index, axis=1), 0) for x in (k, v)]
        return TokenState(*map(_by_head, kept)), None, guide

    def extend(self, state, q, k, v, lengths: Lengths, new: jax.Array, pool, guide=None):
        slots = state.k.shape[1]
        before, after = (_newest_of(n, slots) for n in (lengths.seen, lengths.seen + new))
        out = _extend(state, q, k, v, lengths, new, position=before, window=self.window)
        at = after - lengths.seen[:, None]
        return out, TokenState(*(_replaced(old, x, at, new) for old, x in ((state.k, k), (state.v, v)))), None, guide

    def decode(self, state, q, k, v, lengths: Lengths, pool, guide=None, guess=None):
        return *_decode(state, q, k, v, slot=lengths.seen % state.k.shape[1], last=lengths.seen), guide
