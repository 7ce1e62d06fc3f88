"""What stacked experts, gated MLPs of which each token takes a few, make of tokens: in forms that copy no stack of weights.

A gather of whole experts or `lax.ragged_dot` would, on one platform or another. All forms are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.config import ExpertForm
from icejax.ops.activations import gated
from icejax.ops.attention.dense import EINSUM
from icejax.ops.experts.offloaded_experts import OffloadedExperts, is_offloaded
from icejax.ops.quantized.products import Grouped, product
from icejax.ops.topk import inverse, ranks

FEW = 16  # tokens up to which most experts taken are taken by one token alone
MANY = 64  # up to which an accelerator multiplies all tokens by an expert while it reads the next one, and holds all products
PLAIN = ExpertForm()
LEAST_BLOCK, MOST_BLOCK = 16, 128  # rows of a product with one expert


class ExpertWeights(NamedTuple):
    """The weights of all experts, or their codes in the same place, and what is added to products; None: nothing.

    All three matrices of an expert are in host memory, or none is.
    """

    gate: jax.Array | Grouped | OffloadedExperts  # dtype[E, F, D]
    up: jax.Array | Grouped | OffloadedExperts  # dtype[E, F, D]
    down: jax.Array | Grouped | OffloadedExperts  # dtype[E, D, F]
    gate_bias: jax.Array | None = None  # dtype[E, F]
    up_bias: jax.Array | None = None  # dtype[E, F]
    down_bias: jax.Array | None = None  # dtype[E, D]


def mix_experts(
    x: Float[Array, "T D"],
    experts: ExpertWeights,
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    *,
    form: ExpertForm = PLAIN,
) -> Float[Array, "T D"]:
    """Returns the sum of what the experts `ids` make of each token, times their fp32 `weights`, in the dtype of `x`."""
    parts = (_in_two if is_offloaded(experts.gate) else _in_one)(x, experts, ids, form)
    return (parts.astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)


def _in_one(x: jax.Array, experts: ExpertWeights, ids: jax.Array, form: ExpertForm) -> jax.Array:
    """Returns what each expert makes of its token, in the form that is best for so many."""
    few, one, blocks, every = (functools.partial(each, form=form) for each in (by_sum, one_by_one, in_blocks, by_all))
    if not isinstance(experts.gate, Grouped) and len(x) <= MANY and ids.size > len(experts.gate):
        return lax.platform_dependent(x, experts, ids, cpu=blocks if len(x) > FEW else one, default=every)
    if len(x) > FEW:
        return blocks(x, experts, ids)
    return lax.platform_dependent(x, experts, ids, cuda=few, rocm=few, default=one)


def _in_two(x: jax.Array, experts: ExpertWeights, ids: jax.Array, form: ExpertForm) -> jax.Array:
    """Returns `_in_one` of experts in host memory: what those on the device make, and what those that come from the host do.

    Both make something of every token, and one of it is taken: side by side in one array the resident ones would be copied.
    """
    matrices, biases, lead = experts[:3], experts[3:], experts.gate
    if ids.size < len(lead.slot):  # a place for each pair of a token and an expert, or for each expert
        asked, wanted, place = ids.reshape(-1), lead.missing(ids).reshape(-1), jnp.minimum(lead.first(ids)[ids], ids.size - 1)
    else:
        asked = jnp.arange(len(lead.slot), dtype=jnp.int32)
        wanted, place = (lead.first(ids) < ids.size) & (lead.slot < 0), ids

    def stack(kept: list[jax.Array | Grouped], numbers: jax.Array) -> ExpertWeights:
        return ExpertWeights(*kept, *(None if x is None else x[numbers] for x in biases))

    with jax.named_scope("fetch"):
        come = stack([x.fetched(asked, wanted) for x in matrices], asked)
    slot = lead.slot[ids]
    here = _in_one(x, stack([x.resident for x in matrices], lead.held()), jnp.maximum(slot, 0), form)
    return jnp.where((slot >= 0)[..., None], here, _in_one(x, come, place, form))


def by_sum(
    x: Float[Array, "T D"], experts: ExpertWeights, ids: Int[Array, "T k"], *, form: ExpertForm = PLAIN
) -> Float[Array, "T k D"]:
    """Returns what each expert makes of its token, in a kernel a matrix: a GPU reads in it what it multiplies."""

    def made(rows: jax.Array, matrices: jax.Array | Grouped, bias: jax.Array | None) -> jax.Array:
        taken, rows = jax.tree.map(lambda x: x[ids], matrices), rows.astype(jnp.float32)
        if isinstance(taken, Grouped):
            groups = rows.reshape(*rows.shape[:2], taken.codes.shape[2], 1, -1)
            y = (taken.weights(jnp.float32) * groups).sum((2, 4))
        else:
            y = (taken.astype(jnp.float32) * rows[:, :, None, :]).sum(-1)
        return y if bias is None else y + bias[ids].astype(jnp.float32)

    return _through(experts, x[:, None], made, form)


def one_by_one(
    x: Float[Array, "T D"], experts: ExpertWeights, ids: Int[Array, "T k"], *, form: ExpertForm = PLAIN
) -> Float[Array, "T k D"]:
    """Returns what each expert makes of its token, a pair after the other."""
    pairs = jnp.repeat(x, ids.shape[1], axis=0)[:, None, :], ids.reshape(-1)
    return lax.map(lambda pair: _expert(experts, pair[1], pair[0], form), pairs).reshape(*ids.shape, -1)


def by_all(
    x: Float[Array, "T D"], experts: ExpertWeights, ids: Int[Array, "T k"], *, form: ExpertForm = PLAIN
) -> Float[Array, "T k D"]:
    """Returns what each expert makes of its token, of what all make of all: each is read once, in a product a matrix."""

    def made(rows: jax.Array, matrices: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = EINSUM("td,efd->etf" if rows.ndim == 2 else "etd,efd->etf", rows, matrices)
        return y if bias is None else y + bias[:, None].astype(jnp.float32)

    return _through(experts, x, made, form)[ids, jnp.arange(len(x))[:, None]]


def in_blocks(
    x: Float[Array, "T D"], experts: ExpertWeights, ids: Int[Array, "T k"], *, form: ExpertForm = PLAIN
) -> Float[Array, "T k D"]:
    """Returns what each expert makes of its token: each has blocks of pairs to itself, which stand in its order."""
    count, pairs = len(jax.tree.leaves(experts)[0]), ids.size
    block = min(max(1 << (pairs // count).bit_length(), LEAST_BLOCK), MOST_BLOCK)
    place = ranks(-ids.reshape(-1).astype(jnp.float32))
    taken = (ids.reshape(-1, 1) == jnp.arange(count)[None, :]).sum(0, dtype=jnp.int32)
    first, blocks = jnp.cumsum(taken) - taken, -(-taken // block)
    ends = jnp.cumsum(blocks)
    tokens = jnp.pad(inverse(place) // ids.shape[1], (0, block))

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = (ends <= i).sum()
        at = first[expert] + (i - ends[expert] + blocks[expert]) * block
        made = _expert(experts, expert, x[lax.dynamic_slice_in_dim(tokens, at, block)], form)
        # What an expert's last block has too many is the next one's, which overwrites it.
        return lax.dynamic_update_slice_in_dim(out, made, at, axis=0)

    out = lax.fori_loop(0, ends[-1], fill, jnp.zeros((pairs + block, x.shape[1]), x.dtype))
    return out[place].reshape(*ids.shape, -1)


def _expert(experts: ExpertWeights, index: jax.Array, x: jax.Array, form: ExpertForm) -> jax.Array:
    own = jax.tree.map(lambda each: lax.dynamic_index_in_dim(each, index, keepdims=False), experts)

    def made(rows: jax.Array, matrix: jax.Array | Grouped, bias: jax.Array | None) -> jax.Array:
        y = product(rows[None], matrix)[0]
        return y if bias is None else y + bias.astype(jnp.float32)[None]

    return _through(own, x, made, form)


def _through(experts: ExpertWeights, x: jax.Array, made: Callable[..., jax.Array], form: ExpertForm) -> jax.Array:
    """Returns what comes of `x`, where `made` multiplies by one of the matrices and adds its bias."""
    gate, up = made(x, experts.gate, experts.gate_bias), made(x, experts.up, experts.up_bias)
    return made(gated(gate, up, form=form).astype(x.dtype), experts.down, experts.down_bias).astype(x.dtype)
