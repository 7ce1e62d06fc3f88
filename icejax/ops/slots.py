"""Slots on the device: where tokens are put, and moves of tokens between layouts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from icejax.ops.topk import ranks


def append(buffer: Float[Array, "R S H"], new: Float[Array, "B K H"], slot: Int[Array, " B"]) -> Float[Array, "R S H"]:
    """Returns `buffer`, rows and KV heads in one axis, with `new` in `slot` of each row."""
    heads = new.shape[1]
    slots, new = jnp.repeat(slot, heads), joined(new)[:, None].astype(buffer.dtype)
    if len(slot) == 1:
        return jax.lax.dynamic_update_slice(buffer, new, (0, slots[0], 0))
    singly = functools.partial(_singly, together=heads)
    return jax.lax.platform_dependent(buffer, new, slots, cuda=_scattered, rocm=_scattered, default=singly)


def append_apart(buffer: Float[Array, "R S H"], new: Float[Array, "B K H"], slot: Int[Array, "B K"]) -> Float[Array, "R S H"]:
    """Returns `buffer`, rows and KV heads in one axis, with `new` in a `slot` of each row and KV head."""
    parts = buffer, joined(new)[:, None].astype(buffer.dtype), slot.reshape(-1)
    singly = functools.partial(_singly, together=1)
    return jax.lax.platform_dependent(*parts, cuda=_scattered, rocm=_scattered, default=singly)


def _scattered(buffer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """In one kernel; XLA:CPU would copy the buffer for it."""
    return buffer.at[jnp.arange(len(buffer)), slots].set(new[:, 0], mode="promise_in_bounds", unique_indices=True)


def _singly(buffer: jax.Array, new: jax.Array, slots: jax.Array, *, together: int) -> jax.Array:
    """Writes `together` KV heads, which have one slot, at a time."""
    for row in range(0, len(buffer), together):
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + together], (row, slots[row], 0))
    return buffer


def joined(x: Shaped[Array, "B K ..."]) -> Shaped[Array, "R ..."]:
    """Returns [B, K, ...] as [B K, ...]."""
    return x.reshape(-1, *x.shape[2:])


def apart(x: Shaped[Array, "R ..."], heads: int) -> Shaped[Array, "B K ..."]:
    """Returns [B K, ...] as [B, K, ...]."""
    return x.reshape(-1, heads, *x.shape[1:])


def per_head(mask: Bool[Array, "B S"], heads: int) -> Bool[Array, "B K S"]:
    """Returns a mask of rows for every KV head."""
    return jnp.broadcast_to(mask[:, None, :], (mask.shape[0], heads, mask.shape[1]))


def by_head(x: Shaped[Array, "B T K H"]) -> Shaped[Array, "B K T H"]:
    """Returns keys or values as a layer makes them, or a mask of them, in the order of a cache."""
    return x.transpose(0, 2, 1, 3)


def take(x: Float[Array, "B K T H"], positions: Int[Array, "#B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B K S H"]:
    """Returns the tokens of `x` at `positions`, zero where `mask` is False."""
    positions, mask = jnp.broadcast_arrays(positions, mask)
    index = jnp.clip(positions, 0, x.shape[2] - 1)[:, None, :, None]
    return jnp.where(mask[:, None, :, None], jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds"), 0)


def order(positions: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Int[Array, "B S"]:
    """Returns how many slots in `mask` have an earlier position; what stands outside comes last."""
    return ranks(jnp.where(mask, -positions.astype(jnp.float32), -jnp.inf))  # whole numbers up to 2^24 are exact
