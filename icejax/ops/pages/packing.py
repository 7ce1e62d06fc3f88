"""Page formation: a balanced permutation of tokens that puts tokens of similar keys into one page."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention.dense import EINSUM
from icejax.ops.pages.tree import FAN_OUT

BLOCK = 2048  # tokens among which nearest neighbours are sought; chosen in bench/results/pages.md
NODE_BLOCK = 4096  # pages, and nodes
POWER_ITERATIONS = 3
FAR = 1e30  # the distance of what is late: after every token, before what is already taken
EMPTY, PADDING = 2.0, 3.0  # how late an empty slot is, and one that pack adds; 1: a group that is not full


def pack(k: Float[Array, "B K S H"], valid: Bool[Array, "B S"], *, page_size: int, block: int = BLOCK) -> Int[Array, "B K S"]:
    """Returns the order of tokens in pages: page i holds tokens `order[..., i * page_size : (i + 1) * page_size]`.

    Tokens are halved along their main axis down to blocks of about `block`, so cost is S log S; in a block each page is the
    free token farthest from the block's middle with its nearest free neighbours (IceCache's greedy packing, which begins
    with the largest norm, without its tree search). By their mean keys pages are then put into nodes of 8 in the same way,
    and nodes into nodes. The last page may be partial, with empty slots last; empty pages are last of all.

    In one block, with pages of 2 and keys of one channel:

        token   0  1  2  3  4  5  6  7
        key     9  0  1  8  0  9  1  5     the middle is 4.1: token 0 is farthest from it, and 5 nearest to that;
        order   0 5, 1 4, 3 7, 2 6         of those left 1 is farthest, with 4; then 3, with 7; then 2, with 6

    The whole text is packed together. In a stretch of it the few tokens that are like a rare one may be missing; it would come
    into a page of tokens that are not, whose digest does not show it.

    Args:
        k: keys; what stands where `valid` is False is not read.
        valid: which tokens there are.
        page_size: slots of a page; divides S.
        block: tokens among which nearest neighbours are sought.
    """
    batch, heads, tokens, _ = k.shape
    if tokens % page_size:
        raise ValueError(f"{tokens} tokens do not divide into {page_size}-token pages")
    there = jnp.broadcast_to(valid[:, None, :], (batch, heads, tokens))
    keys, late = jnp.where(there[..., None], k, 0).astype(jnp.float32), jnp.where(there, 0.0, EMPTY)
    return _arranged(keys, late, group=page_size, block=block)


def _arranged(keys: jax.Array, late: jax.Array, *, group: int, block: int) -> jax.Array:
    """Returns the order i32[B, K, S] of keys [B, K, S, H] in groups of keys alike, of groups alike in nodes, and so on.

    What is `late` [B, K, S] comes last, by how late it is; its keys are 0.
    """
    items = keys.shape[2]
    levels = max(0, round(math.log2(items / block)))
    part = -(-items // (2**levels * group)) * group
    padding = [(0, 0), (0, 0), (0, part * 2**levels - items)]
    keys, late = jnp.pad(keys, [*padding, (0, 0)]), jnp.pad(late, padding, constant_values=PADDING)
    order = jnp.broadcast_to(jnp.arange(keys.shape[2], dtype=jnp.int32), late.shape)
    for level in range(levels + 1):
        shape = (-1, keys.shape[2] // 2**level)
        parts = keys.reshape(*shape, keys.shape[-1]), late.reshape(shape)
        within = _halves(*parts) if level < levels else _neighbours(*parts, group=group)
        keys, late, order = _reorder(within, keys, late, order)
    if order.shape[2] > group * FAN_OUT:  # else all groups are in one node, in any order
        above = _arranged(*_groups(keys, late, group), group=FAN_OUT, block=NODE_BLOCK)
        order = _reorder(above, order.reshape(*order.shape[:2], -1, group))[0].reshape(order.shape)
    return order[:, :, :items]


def _groups(keys: jax.Array, late: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the mean keys of `size` neighbours each, and how late these are: 0 if all are there, 1 if some."""
    late = late.reshape(*late.shape[:2], -1, size)
    means = keys.reshape(*late.shape, -1).mean(3)
    least = late.min(-1)
    # A group of empty slots and padding stands between the two, so that padding stays last.
    late = jnp.where(least >= EMPTY, late.mean(-1), jnp.where(late.max(-1) > 0, 1.0, 0.0))
    return jnp.where(late[..., None] > 0, 0, means), late


def _reorder(within: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Applies the order i32[nodes, S of a node], or i32[B, K, S], to the third axis of each array, node by node."""
    within = within.reshape(-1, within.shape[-1])
    reordered = []
    for x in arrays:
        flat = x.reshape(*within.shape, *x.shape[3:])
        index = within.reshape(*within.shape, *(1,) * (flat.ndim - 2))
        reordered.append(jnp.take_along_axis(flat, index, axis=1, mode="promise_in_bounds").reshape(x.shape))
    return tuple(reordered)


def _halves(keys: jax.Array, late: jax.Array) -> jax.Array:
    """Sorts the items of every node [n, S, H] along its main axis, so that its halves are alike."""
    there, middle = late == 0, _middle(keys, late)
    # The middle is taken off the products, not off the keys, of which there is no second copy then.
    widest = jnp.where(there, jnp.square(keys).sum(-1) - 2 * EINSUM("nsh,nh->ns", keys, middle), -jnp.inf).argmax(-1)
    axis = jnp.take_along_axis(keys, widest[:, None, None], axis=1)[:, 0] - middle
    for _ in range(POWER_ITERATIONS):
        along = EINSUM("nsh,nh->ns", keys, axis) - (middle * axis).sum(-1, keepdims=True)
        along = jnp.where(there, along, 0)
        axis = EINSUM("nsh,ns->nh", keys, along) - middle * along.sum(-1, keepdims=True)
        axis = axis / (jnp.linalg.norm(axis, axis=-1, keepdims=True) + 1e-30)
    along = jnp.where(there, EINSUM("nsh,nh->ns", keys, axis), FAR * late)
    index = jnp.broadcast_to(jnp.arange(along.shape[-1], dtype=jnp.int32), along.shape)
    return lax.sort((along, index), num_keys=1)[1]


def _neighbours(keys: jax.Array, late: jax.Array, *, group: int) -> jax.Array:
    """Orders the items of every block [n, S, H]: a group is the free one farthest from the middle and those nearest to it."""
    squares = jnp.square(keys).sum(-1)
    outlying = jnp.where(late > 0, -FAR * late, squares - 2 * EINSUM("nsh,nh->ns", keys, _middle(keys, late)))
    number = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]

    def grouped(taken: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        free = jnp.where(taken, -jnp.inf, outlying)
        # The first of the farthest; XLA:CPU takes three times as long for an argmax.
        seed = jnp.where(free == free.max(-1, keepdims=True), number, free.shape[-1] - 1).min(-1)
        key = jnp.take_along_axis(keys, seed[:, None, None], axis=1)[:, 0]
        distance = squares - 2 * EINSUM("nsh,nh->ns", keys, key)  # less the seed's own square, alike for all
        distance = jnp.where(taken, jnp.inf, jnp.where(late > 0, FAR * late, distance))
        chosen = lax.top_k(-distance, group)[1]
        rows = jnp.arange(len(keys))[:, None]
        return taken.at[rows, chosen].set(True), chosen

    _, chosen = lax.scan(grouped, jnp.zeros(late.shape, bool), None, length=keys.shape[1] // group)
    return chosen.transpose(1, 0, 2).reshape(late.shape)


def _middle(keys: jax.Array, late: jax.Array) -> jax.Array:
    """Returns the mean key [n, H] of every node [n, S, H]."""
    return keys.sum(1) / jnp.maximum((late == 0).sum(-1, dtype=jnp.float32), 1.0)[:, None]
