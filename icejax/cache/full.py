"""The exact caches: every token on the device, or the newest ones in a ring."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from icejax.cache.policy import CachePolicy, CacheSpec, Lengths, append, grouped, per_head
from icejax.ops.attention import attend


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


def _decode(state: TokenState, q: jax.Array, k: jax.Array, v: jax.Array, *, slot: jax.Array, last: jax.Array):
    """Appends at `slot` [B] and attends to the slots up to `last` [B]."""
    heads = k.shape[1]
    with jax.named_scope("append"):
        state = TokenState(append(state.k, k, slot), append(state.v, v, slot))
    with jax.named_scope("attend"):
        mask = jnp.arange(state.k.shape[1])[None, :] <= last[:, None]
        out = attend(grouped(q, heads), state.k, state.v, per_head(mask, heads))
    return out.reshape(q.shape), state


@dataclass(frozen=True)
class Full(CachePolicy):
    """Every token on the device, attended exactly: what all other policies are measured against."""

    def init(self, spec: CacheSpec) -> TokenState:
        return _empty(spec, spec.capacity)

    def prefill(self, state, q, k, v, lengths: Lengths):
        valid = (jnp.arange(k.shape[1])[None, :] < lengths.prompt[:, None])[:, :, None, None]
        k, v = (_by_head(jnp.where(valid, x, 0)) for x in (k, v))
        start = (0, 0, 0)
        return TokenState(
            jax.lax.dynamic_update_slice(state.k, k, start), jax.lax.dynamic_update_slice(state.v, v, start)
        ), None

    def decode(self, state, q, k, v, lengths: Lengths, pool):
        return _decode(state, q, k, v, slot=lengths.seen, last=lengths.seen)


@dataclass(frozen=True)
class Ring(CachePolicy):
    """The newest `window` tokens in a ring: all that a sliding-window layer ever sees, exactly."""

    window: int

    def init(self, spec: CacheSpec) -> TokenState:
        return _empty(spec, min(self.window, spec.capacity))

    def prefill(self, state, q, k, v, lengths: Lengths):
        newest = lengths.prompt[:, None] - 1
        slots = state.k.shape[1]
        position = newest - (newest - jnp.arange(slots)[None, :]) % slots  # the newest token of every slot
        index = jnp.maximum(position, 0)[:, :, None, None]
        kept = [jnp.where(position[:, :, None, None] >= 0, jnp.take_along_axis(x, index, axis=1), 0) for x in (k, v)]
        return TokenState(*map(_by_head, kept)), None

    def decode(self, state, q, k, v, lengths: Lengths, pool):
        return _decode(state, q, k, v, slot=lengths.seen % state.k.shape[1], last=lengths.seen)
