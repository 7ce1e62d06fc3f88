"""Page formation: a balanced permutation of tokens that puts tokens of similar keys into one page."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from icejax.ops.attention import EINSUM
from icejax.ops.topk import top_k

BLOCK = 2048  # tokens among which nearest neighbours are sought; chosen in bench/results/pages.md
NODE = 16  # pages that are put side by side at the last
POWER_ITERATIONS = 3
FAR = 1e30  # the distance of an empty slot: after every token, before what is already taken


def pack(
    k: Float[Array, "B K S H"], valid: Bool[Array, "B S"], *, page_size: int, run: int = 1, block: int = BLOCK
) -> Int[Array, "B K S"]:
    """Returns the order of tokens in pages: page i holds tokens `order[..., i * page_size : (i + 1) * page_size]`.

    Tokens are halved along their main axis down to blocks of about `block`, so cost is S log S; in a block each page is the
    free token of largest norm with its nearest free neighbours (greedy packing of IceCache's pages, without its tree
    search). At last the same halving over the pages' mean keys puts pages alike side by side. At most one page is partial,
    two with runs; empty slots come last in a page, and empty pages last of all.

    All tokens are packed together: in a stretch of the text a rare token has no like, and its page's digest does not tell it.

    Args:
        k: keys; what stands where `valid` is False is not read.
        valid: which tokens there are; True for a prefix of every row.
        page_size: slots of a page; divides S.
        run: neighbours in time that stay together, represented by their mean key; divides `page_size`.
        block: tokens among which nearest neighbours are sought.
    """
    batch, heads, tokens, size = k.shape
    if tokens % page_size:
        raise ValueError(f"{tokens} tokens do not divide into {page_size}-token pages")
    levels = max(0, round(math.log2(tokens / block)))
    while tokens % (2**levels * page_size):
        levels -= 1  # larger blocks, of whole pages
    there = jnp.broadcast_to(valid[:, None, :], (batch, heads, tokens))
    keys, valid = _runs(jnp.where(there[..., None], k, 0).astype(jnp.float32), there, run)
    part = tokens // run // 2**levels
    order = _bisected(keys, valid, part=part)
    keys, valid = _reorder(order, keys, valid)
    pages = _neighbours(keys.reshape(-1, part, size), valid.reshape(-1, part), page_size=page_size // run)
    keys, valid, order = _reorder(pages, keys, valid, order)
    # Pages alike become neighbours, so that the nodes of the digest tree are tight.
    means, pages_valid = _runs(jnp.where(valid[..., None], keys, 0), valid, page_size // run)
    order = order.reshape(*means.shape[:3], -1)
    order = _reorder(_bisected(means, pages_valid, part=NODE), order)[0]
    if run == 1:
        return order.reshape(batch, heads, tokens)
    order = order.reshape(batch, heads, -1, page_size // run, 1) * run + jnp.arange(run, dtype=jnp.int32).reshape(
        1, 1, 1, 1, -1
    )
    order = order.reshape(batch, heads, -1, page_size)
    # The last run may be partial, and lie anywhere in its page: its empty slots go to the page's end.
    empty = ~jnp.take_along_axis(there, order.reshape(there.shape), axis=2).reshape(order.shape)
    return lax.sort((empty, order), num_keys=1, is_stable=True)[1].reshape(there.shape)


def _bisected(keys: jax.Array, valid: jax.Array, *, part: int) -> jax.Array:
    """Returns the order i32[B, K, S] that halves [B, K, S, H] along its main axis, down to parts of `part`."""
    size = keys.shape[2]
    levels = max(0, math.ceil(math.log2(size / part)))
    # Empty slots come last, also those that make all parts whole.
    padding = [(0, 0), (0, 0), (0, part * 2**levels - size)]
    keys, valid = jnp.pad(keys, [*padding, (0, 0)]), jnp.pad(valid, padding)
    order = jnp.broadcast_to(jnp.arange(keys.shape[2], dtype=jnp.int32), valid.shape)
    for level in range(levels):
        shape = (-1, keys.shape[2] // 2**level)
        halves = _halves(keys.reshape(*shape, keys.shape[-1]), valid.reshape(shape))
        keys, valid, order = _reorder(halves, keys, valid, order)
    return order[:, :, :size]


def _runs(keys: jax.Array, valid: jax.Array, run: int) -> tuple[jax.Array, jax.Array]:
    """Returns mean keys [B, K, S / run, H] of runs of neighbours, and which runs hold a token."""
    counts = valid.reshape(*valid.shape[:2], -1, run).sum(-1, dtype=jnp.float32)
    totals = keys.reshape(*counts.shape, run, keys.shape[-1]).sum(3)
    return totals / jnp.maximum(counts, 1.0)[..., None], counts > 0


def _reorder(within: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Applies the order i32[nodes, S of a node], or i32[B, K, S], to the third axis of each array, node by node."""
    within = within.reshape(-1, within.shape[-1])
    reordered = []
    for x in arrays:
        flat = x.reshape(*within.shape, *x.shape[3:])
        index = within.reshape(*within.shape, *(1,) * (flat.ndim - 2))
        reordered.append(jnp.take_along_axis(flat, index, axis=1, mode="promise_in_bounds").reshape(x.shape))
    return tuple(reordered)


def _halves(keys: jax.Array, valid: jax.Array) -> jax.Array:
    """Sorts the tokens of every node [n, S, H] along its main axis, so that its halves are alike; empty slots, 0, last."""
    # The mean is taken off the products, not off the keys, of which there is no second copy then.
    mean = keys.sum(1) / jnp.maximum(valid.sum(-1, dtype=jnp.float32), 1.0)[:, None]
    widest = jnp.where(valid, jnp.square(keys).sum(-1) - 2 * EINSUM("nsh,nh->ns", keys, mean), -jnp.inf).argmax(-1)
    axis = jnp.take_along_axis(keys, widest[:, None, None], axis=1)[:, 0] - mean
    for _ in range(POWER_ITERATIONS):
        along = EINSUM("nsh,nh->ns", keys, axis) - (mean * axis).sum(-1, keepdims=True)
        along = jnp.where(valid, along, 0)
        axis = EINSUM("nsh,ns->nh", keys, along) - mean * along.sum(-1, keepdims=True)
        axis = axis / (jnp.linalg.norm(axis, axis=-1, keepdims=True) + 1e-30)
    along = jnp.where(valid, EINSUM("nsh,nh->ns", keys, axis), FAR)
    index = jnp.broadcast_to(jnp.arange(along.shape[-1], dtype=jnp.int32), along.shape)
    return lax.sort((along, index), num_keys=1)[1]


def _neighbours(keys: jax.Array, valid: jax.Array, *, page_size: int) -> jax.Array:
    """Orders the tokens of every block [n, S, H]: a page is the free token of largest norm and those nearest to it."""
    squares = jnp.square(keys).sum(-1)

    def page(taken: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        seed = jnp.where(taken, -jnp.inf, jnp.where(valid, squares, -1.0)).argmax(-1)
        key = jnp.take_along_axis(keys, seed[:, None, None], axis=1)[:, 0]
        distance = squares - 2 * EINSUM("nsh,nh->ns", keys, key)  # less the seed's own square, alike for all
        distance = jnp.where(taken, jnp.inf, jnp.where(valid, distance, FAR))
        chosen = top_k(-distance, page_size)[1]
        rows = jnp.arange(len(keys))[:, None]
        return taken.at[rows, chosen].set(True), chosen

    _, chosen = lax.scan(page, jnp.zeros(valid.shape, bool), None, length=keys.shape[1] // page_size)
    return chosen.transpose(1, 0, 2).reshape(valid.shape)
