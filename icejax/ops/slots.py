"""Writes of tokens into slots, and layouts of keys and values: [B, T, K, H] in a layer, [B, K, S, H] or [B K, S, H] in a cache.

The bases and policies of the cache call them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from icejax.ops.topk import ranks


def append(buffer: Shaped[Array, "R S H"], new: Shaped[Array, "B K H"], slot: Int[Array, " B"]) -> Shaped[Array, "R S H"]:
    """Returns `buffer` with `new` in slot `slot` of each row; rows and KV heads are one axis, R = B K."""
    heads = new.shape[1]
    slots, new = jnp.repeat(slot, heads), merge_heads(new)[:, None].astype(buffer.dtype)
    if len(slot) == 1:
        return jax.lax.dynamic_update_slice(buffer, new, (0, slots[0], 0))
    in_turn = functools.partial(_write_in_turn, together=heads)
    return jax.lax.platform_dependent(buffer, new, slots, cuda=_scatter, rocm=_scatter, default=in_turn)


def append_text(
    buffer: Shaped[Array, "R S H"], new: Shaped[Array, "B T K H"], slot: Int[Array, " B"], count: Int[Array, " B"]
) -> Shaped[Array, "R S H"]:
    """Returns `buffer` with the first `count` new tokens of each row in the slots from `slot` on.

    Only T slots of a row are read and written, so a text costs the same in a large buffer.

    Example: 2 new tokens at slot 6 of 8 slots, T = 4: slots 4 to 7 are read, and 6 and 7 are replaced.
    """
    slots, tokens, heads = buffer.shape[1], new.shape[1], new.shape[2]
    span = min(tokens, slots)
    for row, x in enumerate(by_head(new)):
        first = jnp.minimum(slot[row], slots - span)
        at = first + jnp.arange(span) - slot[row]
        old = jax.lax.dynamic_slice(buffer, (row * heads, first, 0), (heads, span, buffer.shape[2]))
        is_new = ((at >= 0) & (at < count[row]))[None, :, None]
        piece = jnp.where(is_new, jnp.take(x, at, axis=1, mode="clip").astype(buffer.dtype), old)
        buffer = jax.lax.dynamic_update_slice(buffer, piece, (row * heads, first, 0))
    return buffer


def first_slots(buffer: Shaped[Array, "R S *x"], count: Int[Array, " B"]) -> Shaped[Array, "R S *x"]:
    """Returns `buffer` with the first `count` slots of each row, and zeros in the others."""
    rows, slots, *rest = buffer.shape
    held = jnp.arange(slots)[None, :] < jnp.repeat(count, rows // len(count), total_repeat_length=rows)[:, None]
    return jnp.where(held.reshape(rows, slots, *(1 for _ in rest)), buffer, jnp.zeros((), buffer.dtype))


def append_apart(buffer: Float[Array, "R S H"], new: Float[Array, "B K H"], slot: Int[Array, "B K"]) -> Float[Array, "R S H"]:
    """Returns `buffer` with `new` in a slot of its own for each row and KV head."""
    parts = buffer, merge_heads(new)[:, None].astype(buffer.dtype), slot.reshape(-1)
    in_turn = functools.partial(_write_in_turn, together=1)
    return jax.lax.platform_dependent(*parts, cuda=_scatter, rocm=_scatter, default=in_turn)


def _scatter(buffer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes all rows in one kernel, for GPUs: XLA:CPU would copy the buffer."""
    return buffer.at[jnp.arange(len(buffer)), slots].set(new[:, 0], mode="promise_in_bounds", unique_indices=True)


def _write_in_turn(buffer: jax.Array, new: jax.Array, slots: jax.Array, *, together: int) -> jax.Array:
    """Writes `together` neighbouring KV heads at a time, which share one slot."""
    for row in range(0, len(buffer), together):
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + together], (row, slots[row], 0))
    return buffer


def merge_heads(x: Shaped[Array, "B K ..."]) -> Shaped[Array, "R ..."]:
    """Returns [B, K, ...] as [B K, ...]."""
    return x.reshape(-1, *x.shape[2:])


def split_heads(x: Shaped[Array, "R ..."], heads: int) -> Shaped[Array, "B K ..."]:
    """Returns [B K, ...] as [B, K, ...]."""
    return x.reshape(-1, heads, *x.shape[1:])


def per_head(mask: Bool[Array, "B S"], heads: int) -> Bool[Array, "B K S"]:
    """Returns the mask of each row, repeated for every KV head."""
    return jnp.broadcast_to(mask[:, None, :], (mask.shape[0], heads, mask.shape[1]))


def by_head(x: Shaped[Array, "B T K H"]) -> Shaped[Array, "B K T H"]:
    """Returns a layer's keys, values or mask in the axis order of a cache."""
    return x.transpose(0, 2, 1, 3)


def take(x: Float[Array, "B K T H"], positions: Int[Array, "#B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B K S H"]:
    """Returns the tokens of `x` at `positions`, zero where `mask` is False."""
    positions, mask = jnp.broadcast_arrays(positions, mask)
    index = jnp.clip(positions, 0, x.shape[2] - 1)[:, None, :, None]
    return jnp.where(mask[:, None, :, None], jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds"), 0)


def order(positions: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Int[Array, "B S"]:
    """Returns for each slot how many slots in `mask` have an earlier position; slots outside `mask` come last.

    Example: positions [7, 2, 9, 4] with the third slot outside `mask` give [2, 0, 3, 1].
    """
    return ranks(jnp.where(mask, -positions.astype(jnp.float32), -jnp.inf))  # fp32 holds integers up to 2^24 exactly
