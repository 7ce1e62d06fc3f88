"""Top-k and ranks of values [..., n]: by sorting on CPU, by counting larger values on accelerators.

Policies, page selection and expert routers call it. On an accelerator, sorting a thousand numbers takes many dependent steps,
and counting takes one. Beyond `MOST_COUNTED` values `best` and `ranks` sort on every platform; `largest`, which returns only a
mask, finds the smallest chosen value by bisection instead. Of equal values the first ranks higher.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.threshold import least_of, ordered

MOST_COUNTED = 8192  # estimated: comparing more values with one another takes an accelerator longer than a sort
MUCH = 8  # a CPU sorts faster than it bisects where fewer than 1 / 8 of the values are chosen


def best(
    worth: Float[Array, "*R n"], wanted: int, *others: Int[Array, "*R n"], room: Int[Array, "*R"] | None = None
) -> tuple[Int[Array, "*R {wanted}"], Bool[Array, "*R n"], tuple[Int[Array, "*R {wanted}"], ...]]:
    """Returns the indices of the `wanted` largest values, largest first; a mask of these values; and `others` at the indices.

    Args:
        room: how many values the mask holds, at most `wanted`; None: `wanted`.
    """
    by_sorting, by_counting = (functools.partial(form, wanted=wanted) for form in (_best_sorted, _best_counted))
    room = jnp.full(worth.shape[:-1], wanted) if room is None else room
    if worth.shape[-1] > MOST_COUNTED:
        return by_sorting(worth, room, *others)
    return lax.platform_dependent(worth, room, *others, cpu=by_sorting, default=by_counting)


def largest(worth: Float[Array, "*R n"], room: Int[Array, "*R"], *, most: int) -> Bool[Array, "*R n"]:
    """Returns a mask of the `room` largest values of each row; `room` is at most `most`."""
    size = worth.shape[-1]
    by_sorting = functools.partial(_largest_sorted, most=min(most, size))
    if size > MOST_COUNTED:
        few = MUCH * most < size
        return lax.platform_dependent(worth, room, cpu=by_sorting if few else _largest_halved, default=_largest_halved)
    return lax.platform_dependent(worth, room, cpu=by_sorting, default=_largest_counted)


def ranks(worth: Float[Array, "*R n"]) -> Int[Array, "*R n"]:
    """Returns the rank of each value in its row; the largest has rank 0. Example: [3, 9, 3] has the ranks [1, 0, 2]."""
    if worth.shape[-1] > MOST_COUNTED:
        return _ranks_sorted(worth)
    return lax.platform_dependent(worth, cpu=_ranks_sorted, default=_ranks)


def inverse(order: Int[Array, "*R n"]) -> Int[Array, "*R n"]:
    """Returns the inverse of a permutation of each row, without another sort. Example: [2, 0, 1] becomes [1, 2, 0]."""
    flat = order.reshape(-1, order.shape[-1])
    places = jnp.broadcast_to(jnp.arange(flat.shape[1], dtype=jnp.int32)[None], flat.shape)
    inverted = jnp.zeros(flat.shape, jnp.int32).at[jnp.arange(len(flat))[:, None], flat].set(places, unique_indices=True)
    return inverted.reshape(order.shape)


def mask_of(indices: Int[Array, "*R m"], size: int) -> Bool[Array, "*R {size}"]:
    """Returns a mask of the `size` values that is True at the indices."""
    values = jnp.arange(size, dtype=jnp.int32).reshape(*(1,) * (indices.ndim - 1), size, 1)
    return (values == indices[..., None, :]).any(-1)


def _best_sorted(worth: jax.Array, room: jax.Array, *others: jax.Array, wanted: int):
    indices = lax.top_k(worth, wanted)[1]
    return indices, _first_of(indices, room, worth.shape[-1]), tuple(jnp.take_along_axis(x, indices, axis=-1) for x in others)


def _best_counted(worth: jax.Array, room: jax.Array, *others: jax.Array, wanted: int):
    rank = _ranks(worth)
    wanted_ranks = jnp.arange(wanted, dtype=jnp.int32).reshape(*(1,) * (worth.ndim - 1), wanted, 1)
    at_rank = rank[..., None, :] == wanted_ranks
    numbers = lax.broadcasted_iota(jnp.int32, worth.shape, worth.ndim - 1)
    # One value of a row has each rank, so the masked sum is that value; one kernel makes all sums.
    indices, *others = (jnp.where(at_rank, x[..., None, :], 0).sum(-1) for x in (numbers, *others))
    return indices, rank < room[..., None], tuple(others)


def _largest_sorted(worth: jax.Array, room: jax.Array, *, most: int) -> jax.Array:
    return _first_of(lax.top_k(worth, most)[1], room, worth.shape[-1])


def _first_of(indices: jax.Array, room: jax.Array, size: int) -> jax.Array:
    """Returns a mask of the first `room` indices by a scatter: on a CPU `mask_of` takes three times as long."""
    flat = indices.reshape(room.size, indices.shape[-1])
    chosen = jnp.arange(flat.shape[1])[None, :] < room.reshape(-1, 1)
    mask = jnp.zeros((len(flat), size), bool).at[jnp.arange(len(flat))[:, None], flat].set(chosen)
    return mask.reshape(*indices.shape[:-1], size)


def _largest_halved(worth: jax.Array, room: jax.Array) -> jax.Array:
    """Finds the smallest chosen value by bisection; of the values equal to it the first are chosen, up to `room`."""
    order, room = ordered(jnp.where(jnp.isnan(worth), -jnp.inf, worth)), room[..., None]
    least = least_of(order.reshape(room.size, -1), room.reshape(-1))
    larger, equal = (f(order, least.reshape(room.shape)) for f in (jnp.greater, jnp.equal))
    remaining = room - larger.sum(-1, keepdims=True, dtype=jnp.int32)
    return larger | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= remaining))


def _largest_counted(worth: jax.Array, room: jax.Array) -> jax.Array:
    return _ranks(worth) < room[..., None]


def _ranks_sorted(worth: jax.Array) -> jax.Array:
    return inverse(jnp.argsort(-worth, axis=-1, stable=True))


def _ranks(worth: jax.Array) -> jax.Array:
    """Returns the rank of each value, i32[*R, n]; NaN counts as -inf, so that ranks are unique."""
    worth = jnp.where(jnp.isnan(worth), -jnp.inf, worth)
    own, other = worth[..., :, None], worth[..., None, :]
    size = worth.shape[-1]
    before = jnp.arange(size)[None, :] < jnp.arange(size)[:, None]
    before = before.reshape(*(1,) * (worth.ndim - 1), size, size)
    return ((other > own) | ((other == own) & before)).sum(-1, dtype=jnp.int32)
