"""Packing: a balanced permutation of tokens that puts tokens with similar keys into one page.

Policies with digests pack the keys [B, K, S, H] of a prompt or further text, and of new pages at compaction.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention.dense import EINSUM
from icejax.ops.pages.tree import FAN_OUT

BLOCK = 2048  # tokens of a block, within which nearest neighbours are sought; chosen in bench/results/pages.md
NODE_BLOCK = 4096  # the same for pages and nodes
POWER_ITERATIONS = 3
FAR = 1e30  # distance of late items: larger than any token's, smaller than that of grouped items
EMPTY, PADDING = 2.0, 3.0  # lateness of an empty slot, and of a slot added as padding; 1: a group with some empty slots


def pack(k: Float[Array, "B K S H"], valid: Bool[Array, "B S"], *, page_size: int, block: int = BLOCK) -> Int[Array, "B K S"]:
    """Returns the order of tokens in pages: page i holds tokens `order[..., i * page_size : (i + 1) * page_size]`.

    Tokens are halved along their main axis down to blocks of about `block`, so the cost is S log S. In a block, the free token
    farthest from the block's mean forms a page with its nearest free neighbours (IceCache's greedy packing, without its tree
    search; IceCache begins with the largest norm). Pages are grouped into nodes of 8 in the same way, by their mean keys, and
    nodes into nodes. The last page may be partial, with empty slots last; empty pages come after it.

    In one block, with pages of 2 and keys of one channel:

        token   0  1  2  3  4  5  6  7
        key     9  0  1  8  0  9  1  5     the mean is 4.1: token 0 is farthest from it, and token 5 nearest to token 0;
        order   0 5, 1 4, 3 7, 2 6         of the free tokens 1 is farthest, with 4; then 3, with 7; then 2, with 6

    The whole text is packed together. In a shorter stretch a rare token may lack its few similar tokens; it would join a page
    of different tokens, whose digest does not show it.

    Args:
        k: keys; not read where `valid` is False.
        valid: which of the S positions hold a token.
        page_size: slots of a page; divides S.
        block: tokens of a block, within which nearest neighbours are sought.

    Raises:
        ValueError: `page_size` does not divide S.
    """
    batch, heads, tokens, _ = k.shape
    if tokens % page_size:
        raise ValueError(f"{tokens} tokens are not a multiple of the page size {page_size}")
    mask = jnp.broadcast_to(valid[:, None, :], (batch, heads, tokens))
    keys, late = jnp.where(mask[..., None], k, 0).astype(jnp.float32), jnp.where(mask, 0.0, EMPTY)
    return _hierarchical_order(keys, late, group=page_size, block=block)


def _hierarchical_order(keys: jax.Array, late: jax.Array, *, group: int, block: int) -> jax.Array:
    """Returns the order i32[B, K, S] that puts similar keys [B, K, S, H] into groups, similar groups into nodes, and so on.

    Items with `late` [B, K, S] above 0 come last, in increasing order of it; their keys are 0.
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
        order_in_part = _halves(*parts) if level < levels else _neighbours(*parts, group=group)
        keys, late, order = _reorder(order_in_part, keys, late, order)
    if order.shape[2] > group * FAN_OUT:  # else all groups share one node, in any order
        group_order = _hierarchical_order(*_groups(keys, late, group), group=FAN_OUT, block=NODE_BLOCK)
        order = _reorder(group_order, order.reshape(*order.shape[:2], -1, group))[0].reshape(order.shape)
    return order[:, :, :items]


def _groups(keys: jax.Array, late: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the mean keys of groups of `size` items, and their lateness: 0 for a full group, 1 for a partial one."""
    late = late.reshape(*late.shape[:2], -1, size)
    means = keys.reshape(*late.shape, -1).mean(3)
    earliest = late.min(-1)
    # A group of empty slots and padding has a lateness between theirs, so that padding stays last.
    late = jnp.where(earliest >= EMPTY, late.mean(-1), jnp.where(late.max(-1) > 0, 1.0, 0.0))
    return jnp.where(late[..., None] > 0, 0, means), late


def _reorder(order: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Reorders the third axis of each array within parts of it, by `order` i32[parts, items of a part] or i32[B, K, S]."""
    order = order.reshape(-1, order.shape[-1])
    reordered = []
    for x in arrays:
        flat = x.reshape(*order.shape, *x.shape[3:])
        index = order.reshape(*order.shape, *(1,) * (flat.ndim - 2))
        reordered.append(jnp.take_along_axis(flat, index, axis=1, mode="promise_in_bounds").reshape(x.shape))
    return tuple(reordered)


def _halves(keys: jax.Array, late: jax.Array) -> jax.Array:
    """Returns the order of the items of each part [n, S, H] along its main axis, so that each half holds similar keys."""
    valid, mean = late == 0, _mean_key(keys, late)
    # The mean is subtracted from the products, not from the keys: no second copy of the keys is needed.
    farthest = jnp.where(valid, jnp.square(keys).sum(-1) - 2 * EINSUM("nsh,nh->ns", keys, mean), -jnp.inf).argmax(-1)
    axis = jnp.take_along_axis(keys, farthest[:, None, None], axis=1)[:, 0] - mean
    for _ in range(POWER_ITERATIONS):
        along = EINSUM("nsh,nh->ns", keys, axis) - (mean * axis).sum(-1, keepdims=True)
        along = jnp.where(valid, along, 0)
        axis = EINSUM("nsh,ns->nh", keys, along) - mean * along.sum(-1, keepdims=True)
        axis = axis / (jnp.linalg.norm(axis, axis=-1, keepdims=True) + 1e-30)
    along = jnp.where(valid, EINSUM("nsh,nh->ns", keys, axis), FAR * late)
    index = jnp.broadcast_to(jnp.arange(along.shape[-1], dtype=jnp.int32), along.shape)
    return lax.sort((along, index), num_keys=1)[1]


def _neighbours(keys: jax.Array, late: jax.Array, *, group: int) -> jax.Array:
    """Returns the order of each block's items [n, S, H]: a group is the free item farthest from the mean and its neighbours."""
    squares = jnp.square(keys).sum(-1)
    outlying = jnp.where(late > 0, -FAR * late, squares - 2 * EINSUM("nsh,nh->ns", keys, _mean_key(keys, late)))
    number = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]

    def next_group(grouped: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        free = jnp.where(grouped, -jnp.inf, outlying)
        # The first of the farthest; XLA:CPU takes three times as long for an argmax.
        seed = jnp.where(free == free.max(-1, keepdims=True), number, free.shape[-1] - 1).min(-1)
        key = jnp.take_along_axis(keys, seed[:, None, None], axis=1)[:, 0]
        distance = squares - 2 * EINSUM("nsh,nh->ns", keys, key)  # squared, without the seed's own square, which all share
        distance = jnp.where(grouped, jnp.inf, jnp.where(late > 0, FAR * late, distance))
        members = lax.top_k(-distance, group)[1]
        rows = jnp.arange(len(keys))[:, None]
        return grouped.at[rows, members].set(True), members

    _, members = lax.scan(next_group, jnp.zeros(late.shape, bool), None, length=keys.shape[1] // group)
    return members.transpose(1, 0, 2).reshape(late.shape)


def _mean_key(keys: jax.Array, late: jax.Array) -> jax.Array:
    """Returns the mean key [n, H] of each part [n, S, H], over items that are not late."""
    return keys.sum(1) / jnp.maximum((late == 0).sum(-1, dtype=jnp.float32), 1.0)[:, None]
