"""Mixture of experts over tokens [T, D], with k experts per token, in forms that never copy the stacked weights.

The decoder's expert layers call `mix_experts`, which picks a form by platform and by the number of tokens. A gather of whole
experts or `lax.ragged_dot` would copy the stack on some platform. All forms are deterministic.
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

FEW = 16  # tokens up to which most chosen experts have a single token
MANY = 64  # tokens up to which an accelerator runs all tokens through every expert: it computes while it reads the next one
PLAIN = ExpertForm()
LEAST_BLOCK, MOST_BLOCK = 16, 128  # bounds of a block: rows of one product with one expert


class ExpertWeights(NamedTuple):
    """The matrices of all experts, dense, quantized or in host memory, and the biases of their products; None: no bias.

    Assumes that all three matrices are in host memory, or none is.
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
    """Returns for each token the sum of the outputs of its experts `ids`, times their fp32 `weights`, in the dtype of `x`."""
    parts = (_offloaded if is_offloaded(experts.gate) else _on_device)(x, experts, ids, form)
    return (parts.astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)


def _on_device(x: jax.Array, experts: ExpertWeights, ids: jax.Array, form: ExpertForm) -> jax.Array:
    """Returns the output of every pair (token, expert), [T, k, D], in the fastest form for T tokens."""
    summed, looped, blocked, dense = (functools.partial(run, form=form) for run in (by_sum, one_by_one, in_blocks, by_all))
    if not isinstance(experts.gate, Grouped) and len(x) <= MANY and ids.size > len(experts.gate):
        return lax.platform_dependent(x, experts, ids, cpu=blocked if len(x) > FEW else looped, default=dense)
    if len(x) > FEW:
        return blocked(x, experts, ids)
    if isinstance(experts.gate, Grouped) and experts.gate.by_row:  # the form of a CPU, which `by_sum` does not read
        return looped(x, experts, ids)
    return lax.platform_dependent(x, experts, ids, cuda=summed, rocm=summed, default=looped)


def _offloaded(x: jax.Array, experts: ExpertWeights, ids: jax.Array, form: ExpertForm) -> jax.Array:
    """Returns the same as `_on_device`, for experts in host memory, in two passes: with resident and with fetched experts.

    Each pass covers all pairs, and each pair takes its result from one of them: joining fetched and resident matrices in one
    array would copy the resident ones.
    """
    matrices, biases, gate = experts[:3], experts[3:], experts.gate
    if ids.size < len(gate.slot):  # one fetched expert per pair (token, choice), else one per expert
        fetch_ids, wanted, place = (
            ids.reshape(-1),
            gate.missing(ids).reshape(-1),
            jnp.minimum(gate.first(ids)[ids], ids.size - 1),
        )
    else:
        fetch_ids = jnp.arange(len(gate.slot), dtype=jnp.int32)
        wanted, place = (gate.first(ids) < ids.size) & (gate.slot < 0), ids

    def stack(parts: list[jax.Array | Grouped], numbers: jax.Array) -> ExpertWeights:
        return ExpertWeights(*parts, *(None if x is None else x[numbers] for x in biases))

    with jax.named_scope("fetch"):
        fetched = stack([x.fetched(fetch_ids, wanted) for x in matrices], fetch_ids)
    slot = gate.slot[ids]
    here = _on_device(x, stack([x.resident for x in matrices], gate.held()), jnp.maximum(slot, 0), form)
    return jnp.where((slot >= 0)[..., None], here, _on_device(x, fetched, place, form))


def by_sum(
    x: Float[Array, "T D"], experts: ExpertWeights, ids: Int[Array, "T k"], *, form: ExpertForm = PLAIN
) -> Float[Array, "T k D"]:
    """Returns the output of every pair, in one kernel per matrix: a GPU gathers weights in the kernel that multiplies them."""

    def multiply(rows: jax.Array, matrices: jax.Array | Grouped, bias: jax.Array | None) -> jax.Array:
        chosen, rows = jax.tree.map(lambda x: x[ids], matrices), rows.astype(jnp.float32)
        if isinstance(chosen, Grouped):
            groups = rows.reshape(*rows.shape[:2], chosen.codes.shape[2], 1, -1)
            y = (chosen.weights(jnp.float32) * groups).sum((2, 4))
        else:
            y = (chosen.astype(jnp.float32) * rows[:, :, None, :]).sum(-1)
        return y if bias is None else y + bias[ids].astype(jnp.float32)

    return _gated_mlp(experts, x[:, None], multiply, form)


def one_by_one(
    x: Float[Array, "T D"], experts: ExpertWeights, ids: Int[Array, "T k"], *, form: ExpertForm = PLAIN
) -> Float[Array, "T k D"]:
    """Returns the output of every pair, in a loop over the pairs."""
    pairs = jnp.repeat(x, ids.shape[1], axis=0)[:, None, :], ids.reshape(-1)
    return lax.map(lambda pair: _expert(experts, pair[1], pair[0], form), pairs).reshape(*ids.shape, -1)


def by_all(
    x: Float[Array, "T D"], experts: ExpertWeights, ids: Int[Array, "T k"], *, form: ExpertForm = PLAIN
) -> Float[Array, "T k D"]:
    """Returns the output of every pair, picked from all experts' outputs for all tokens: one product reads a matrix once."""

    def multiply(rows: jax.Array, matrices: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = EINSUM("td,efd->etf" if rows.ndim == 2 else "etd,efd->etf", rows, matrices)
        return y if bias is None else y + bias[:, None].astype(jnp.float32)

    return _gated_mlp(experts, x, multiply, form)[ids, jnp.arange(len(x))[:, None]]


def in_blocks(
    x: Float[Array, "T D"], experts: ExpertWeights, ids: Int[Array, "T k"], *, form: ExpertForm = PLAIN
) -> Float[Array, "T k D"]:
    """Returns the output of every pair, from pairs sorted by expert and cut into blocks with one expert each.

    Example: of 23 pairs 20 choose expert 0 and 3 expert 2. In blocks of 16, sorted rows 0-15 and 16-31 go through expert 0 and
    rows 20-35 through expert 2, which overwrites rows 20-31; rows beyond 22 are padding.
    """
    num_experts, pairs = len(jax.tree.leaves(experts)[0]), ids.size
    block = min(max(1 << (pairs // num_experts).bit_length(), LEAST_BLOCK), MOST_BLOCK)
    place = ranks(-ids.reshape(-1).astype(jnp.float32))
    counts = (ids.reshape(-1, 1) == jnp.arange(num_experts)[None, :]).sum(0, dtype=jnp.int32)
    first, blocks = jnp.cumsum(counts) - counts, -(-counts // block)
    ends = jnp.cumsum(blocks)
    tokens = jnp.pad(inverse(place) // ids.shape[1], (0, block))

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = (ends <= i).sum()
        at = first[expert] + (i - ends[expert] + blocks[expert]) * block
        outputs = _expert(experts, expert, x[lax.dynamic_slice_in_dim(tokens, at, block)], form)
        # The last block of an expert may run into the rows of the next expert, whose block overwrites them.
        return lax.dynamic_update_slice_in_dim(out, outputs, at, axis=0)

    out = lax.fori_loop(0, ends[-1], fill, jnp.zeros((pairs + block, x.shape[1]), x.dtype))
    return out[place].reshape(*ids.shape, -1)


def _expert(experts: ExpertWeights, index: jax.Array, x: jax.Array, form: ExpertForm) -> jax.Array:
    """Returns the output of one expert for the rows of `x`."""
    expert = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, index, keepdims=False), experts)

    def multiply(rows: jax.Array, matrix: jax.Array | Grouped, bias: jax.Array | None) -> jax.Array:
        y = product(rows[None], matrix)[0]
        return y if bias is None else y + bias.astype(jnp.float32)[None]

    return _gated_mlp(expert, x, multiply, form)


def _gated_mlp(experts: ExpertWeights, x: jax.Array, multiply: Callable[..., jax.Array], form: ExpertForm) -> jax.Array:
    """Returns a gated MLP of `x`; `multiply` applies one of the matrices and adds its bias."""
    gate, up = multiply(x, experts.gate, experts.gate_bias), multiply(x, experts.up, experts.up_bias)
    return multiply(gated(gate, up, form=form).astype(x.dtype), experts.down, experts.down_bias).astype(x.dtype)
