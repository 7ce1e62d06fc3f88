"""What stacked experts, gated MLPs of which each token takes a few, make of tokens: in forms that copy no stack of weights.

A gather of whole experts or `lax.ragged_dot` would, on one platform or another. All forms are deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.ops.quantized import Grouped, product

FEW = 16  # tokens up to which most experts taken are taken by one token alone
LEAST_BLOCK, MOST_BLOCK = 16, 128  # rows of a product with one expert


class Stack(NamedTuple):
    """The weights of all experts, or their codes in the same place."""

    gate: jax.Array | Grouped  # dtype[E, F, D]
    up: jax.Array | Grouped  # dtype[E, F, D]
    down: jax.Array | Grouped  # dtype[E, D, F]


def mixed(x: Float[Array, "T D"], experts: Stack, ids: Int[Array, "T k"], weights: Float[Array, "T k"]) -> Float[Array, "T D"]:
    """Returns the sum of what the experts `ids` make of each token, times their fp32 `weights`, in the dtype of `x`."""
    if len(x) > FEW:
        parts = in_blocks(x, experts, ids)
    else:
        parts = lax.platform_dependent(x, experts, ids, cuda=by_sum, rocm=by_sum, default=one_by_one)
    return (parts.astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)


def by_sum(x: Float[Array, "T D"], experts: Stack, ids: Int[Array, "T k"]) -> Float[Array, "T k D"]:
    """Returns what each expert makes of its token, in a kernel a matrix: a GPU reads in it what it multiplies."""

    def made(rows: jax.Array, matrices: jax.Array | Grouped) -> jax.Array:
        taken, rows = jax.tree.map(lambda x: x[ids], matrices), rows.astype(jnp.float32)
        if not isinstance(taken, Grouped):
            return (taken.astype(jnp.float32) * rows[:, :, None, :]).sum(-1)
        groups = rows.reshape(*rows.shape[:2], taken.codes.shape[2], 1, -1)
        return (taken.weights(jnp.float32) * groups).sum((2, 4))

    inner = jax.nn.silu(made(x[:, None], experts.gate)) * made(x[:, None], experts.up)
    return made(inner.astype(x.dtype), experts.down).astype(x.dtype)


def one_by_one(x: Float[Array, "T D"], experts: Stack, ids: Int[Array, "T k"]) -> Float[Array, "T k D"]:
    """Returns what each expert makes of its token, a pair after the other."""
    pairs = jnp.repeat(x, ids.shape[1], axis=0)[:, None, :], ids.reshape(-1)
    return lax.map(lambda pair: _expert(experts, pair[1], pair[0]), pairs).reshape(*ids.shape, -1)


def in_blocks(x: Float[Array, "T D"], experts: Stack, ids: Int[Array, "T k"]) -> Float[Array, "T k D"]:
    """Returns what each expert makes of its token: pairs are sorted by expert, and each has blocks of them to itself."""
    count, pairs = len(jax.tree.leaves(experts)[0]), ids.size
    block = min(max(1 << (pairs // count).bit_length(), LEAST_BLOCK), MOST_BLOCK)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    taken = (ids.reshape(-1, 1) == jnp.arange(count)[None, :]).sum(0, dtype=jnp.int32)
    first, blocks = jnp.cumsum(taken) - taken, -(-taken // block)
    ends = jnp.cumsum(blocks)
    tokens = jnp.pad(order // ids.shape[1], (0, block))

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = (ends <= i).sum()
        at = first[expert] + (i - ends[expert] + blocks[expert]) * block
        made = _expert(experts, expert, x[lax.dynamic_slice_in_dim(tokens, at, block)])
        # What an expert's last block has too many is the next one's, which overwrites it.
        return lax.dynamic_update_slice_in_dim(out, made, at, axis=0)

    out = lax.fori_loop(0, ends[-1], fill, jnp.zeros((pairs + block, x.shape[1]), x.dtype))
    return out[jnp.argsort(order)].reshape(*ids.shape, -1)


def _expert(experts: Stack, index: jax.Array, x: jax.Array) -> jax.Array:
    own = jax.tree.map(lambda each: lax.dynamic_index_in_dim(each, index, keepdims=False), experts)
    inner = jax.nn.silu(product(x[None], own.gate)) * product(x[None], own.up)
    return product(inner.astype(x.dtype), own.down)[0].astype(x.dtype)
