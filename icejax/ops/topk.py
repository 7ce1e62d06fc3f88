"""Which values are the largest: by sorting on CPU, elsewhere by counting those that are larger, unless they are very many.

An accelerator sorts a thousand numbers in many dependent steps, and counts them in one. Very many, of which only the set of the
largest is asked for, are not sorted either: bisection finds the least of these. Of equal values the first is larger.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.threshold import least_of, ordered

MOST_COUNTED = 8192  # by estimate: each is compared with all, which for more takes an accelerator longer than the steps
MUCH = 8  # a CPU sorts the largest of so many times as many faster than it finds the least of them by bisection


def best(
    worth: Float[Array, "*R n"], wanted: int, *others: Int[Array, "*R n"], room: Int[Array, "*R"] | None = None
) -> tuple[Int[Array, "*R {wanted}"], Bool[Array, "*R n"], tuple[Int[Array, "*R {wanted}"], ...]]:
    """Returns the indices of the `wanted` largest values, largest first, which values they are, and `others` at the indices.

    Args:
        room: how many of them count among those that they are, at most `wanted`; None: all.
    """
    by_sorting, by_counting = (functools.partial(form, wanted=wanted) for form in (_best_sorted, _best_counted))
    room = jnp.full(worth.shape[:-1], wanted) if room is None else room
    if worth.shape[-1] > MOST_COUNTED:
        return by_sorting(worth, room, *others)
    return lax.platform_dependent(worth, room, *others, cpu=by_sorting, default=by_counting)


def largest(worth: Float[Array, "*R n"], room: Int[Array, "*R"], *, most: int) -> Bool[Array, "*R n"]:
    """Returns which values are the `room` largest of their row; `room` is at most `most`."""
    size = worth.shape[-1]
    by_sorting = functools.partial(_largest_sorted, most=min(most, size))
    if size > MOST_COUNTED:
        few = MUCH * most < size
        return lax.platform_dependent(worth, room, cpu=by_sorting if few else _largest_halved, default=_largest_halved)
    return lax.platform_dependent(worth, room, cpu=by_sorting, default=_largest_counted)


def ranks(worth: Float[Array, "*R n"]) -> Int[Array, "*R n"]:
    """Returns how many values of its row come before each, the largest first."""
    if worth.shape[-1] > MOST_COUNTED:
        return _ranks_sorted(worth)
    return lax.platform_dependent(worth, cpu=_ranks_sorted, default=_ranks)


def inverse(order: Int[Array, "*R n"]) -> Int[Array, "*R n"]:
    """Returns at which place of its row's `order`, which names each of n once, each stands: without another sort."""
    flat = order.reshape(-1, order.shape[-1])
    places = jnp.broadcast_to(jnp.arange(flat.shape[1], dtype=jnp.int32)[None], flat.shape)
    found = jnp.zeros(flat.shape, jnp.int32).at[jnp.arange(len(flat))[:, None], flat].set(places, unique_indices=True)
    return found.reshape(order.shape)


def mask_of(indices: Int[Array, "*R m"], size: int) -> Bool[Array, "*R {size}"]:
    """Returns which of `size` values the indices name."""
    values = jnp.arange(size, dtype=jnp.int32).reshape(*(1,) * (indices.ndim - 1), size, 1)
    return (values == indices[..., None, :]).any(-1)


def _best_sorted(worth: jax.Array, room: jax.Array, *others: jax.Array, wanted: int):
    indices = lax.top_k(worth, wanted)[1]
    return indices, _first_of(indices, room, worth.shape[-1]), tuple(jnp.take_along_axis(x, indices, axis=-1) for x in others)


def _best_counted(worth: jax.Array, room: jax.Array, *others: jax.Array, wanted: int):
    rank = _ranks(worth)
    places = jnp.arange(wanted, dtype=jnp.int32).reshape(*(1,) * (worth.ndim - 1), wanted, 1)
    here = rank[..., None, :] == places
    numbers = lax.broadcasted_iota(jnp.int32, worth.shape, worth.ndim - 1)
    # One value of a row has a rank, so that its sum is that value: all of them come from one kernel.
    indices, *others = (jnp.where(here, x[..., None, :], 0).sum(-1) for x in (numbers, *others))
    return indices, rank < room[..., None], tuple(others)


def _largest_sorted(worth: jax.Array, room: jax.Array, *, most: int) -> jax.Array:
    return _first_of(lax.top_k(worth, most)[1], room, worth.shape[-1])


def _first_of(indices: jax.Array, room: jax.Array, size: int) -> jax.Array:
    """Returns which of `size` values the first `room` indices name: to compare all with all takes a CPU thrice as long."""
    flat = indices.reshape(room.size, indices.shape[-1])
    fits = jnp.arange(flat.shape[1])[None, :] < room.reshape(-1, 1)
    found = jnp.zeros((len(flat), size), bool).at[jnp.arange(len(flat))[:, None], flat].set(fits)
    return found.reshape(*indices.shape[:-1], size)


def _largest_halved(worth: jax.Array, room: jax.Array) -> jax.Array:
    """Finds the least of them by bisection; of those equal to it the first are taken, up to the room."""
    order, room = ordered(jnp.where(jnp.isnan(worth), -jnp.inf, worth)), room[..., None]
    least = least_of(order.reshape(room.size, -1), room.reshape(-1))
    more, same = (f(order, least.reshape(room.shape)) for f in (jnp.greater, jnp.equal))
    left = room - more.sum(-1, keepdims=True, dtype=jnp.int32)
    return more | (same & (jnp.cumsum(same, axis=-1, dtype=jnp.int32) <= left))


def _largest_counted(worth: jax.Array, room: jax.Array) -> jax.Array:
    return _ranks(worth) < room[..., None]


def _ranks_sorted(worth: jax.Array) -> jax.Array:
    return inverse(jnp.argsort(-worth, axis=-1, stable=True))


def _ranks(worth: jax.Array) -> jax.Array:
    """Returns how many values of a row are larger than each, i32[*R, n]; NaN is the smallest, so that each has its own."""
    worth = jnp.where(jnp.isnan(worth), -jnp.inf, worth)
    own, other = worth[..., :, None], worth[..., None, :]
    size = worth.shape[-1]
    before = jnp.arange(size)[None, :] < jnp.arange(size)[:, None]
    before = before.reshape(*(1,) * (worth.ndim - 1), size, size)
    return ((other > own) | ((other == own) & before)).sum(-1, dtype=jnp.int32)
