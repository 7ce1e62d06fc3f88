"""Products x W^T with quantized or dense matrices W [O, I]: a device reads the codes and scales the result.

Linear layers, routers, experts and the embedding call them, with activations [B, T, I].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import EINSUM

MOST_ROWS = 16  # most rows of x that multiply codes directly; for more, the partial sums per group would outgrow the matrix
# Weights that a CPU converts to fp32 at once. For few rows of x: fewer weights do not occupy several cores, more leave their
# caches. For more rows the product of a whole matrix is faster than many small ones, for at most 256 MiB.
BLOCK, LARGE_BLOCK = 2**19, 2**26
MOST_DENSE = 2**28  # weights that `with_dense_matrices` dequantizes: 1 GiB in fp32


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale", "zero"), meta_fields=("by_row",))
@dataclass(frozen=True)
class Grouped:
    """A quantized matrix [O, I], or one for each expert: rows are cut into G groups of g, and weight = (code - zero) * scale.

    Groups are the first axis: in every other order XLA copies the matrix on some accelerator. On a CPU rows are the first axis,
    so that a block of rows is one stretch of memory, and all of a row is multiplied at once. An e2m1 matrix that is not one of
    experts is held as int8, its numbers doubled. From codes of 4 bits (float4, or int4 decoded by arithmetic) XLA:GPU would
    make a copy in 16 bits for products of 8 rows: it fuses only a plain cast of the codes into the product, unless
    xla_gpu_experimental_gemm_fusion_v2 is set.

    Example: I = 256 in groups of 64 and O = 8 have codes [4, 8, 64] and scales [4, 8]; on a CPU [8, 4, 64] and [8, 4].

    Attributes:
        codes: weights as numbers in a narrow dtype, or as bit patterns of bfloat16 (uint16).
        scale: one factor per group of a row.
        zero: the code of the weight 0 in each group; None: 0.
        by_row: whether rows are the first axis.
    """

    codes: jax.Array  # int4, int8, float8_e4m3fn, float4_e2m1fn (experts only) or uint16, [..., G, O, g] or [..., O, G, g]
    scale: jax.Array  # f32[..., G, O] or [..., O, G]
    zero: jax.Array | None  # int8 or f32, in the shape of `scale`
    by_row: bool = False

    def numbers(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the codes as unscaled numbers, in their shape."""
        if self.codes.dtype != jnp.uint16:
            return self.codes.astype(dtype)
        return lax.bitcast_convert_type(self.codes.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)

    def weights(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the dequantized matrix in groups, in the shape of the codes."""
        wide = self.numbers(jnp.float32)
        if self.zero is not None:
            wide -= self.zero.astype(jnp.float32)[..., None]
        return (wide * self.scale[..., None]).astype(dtype)


def with_dense_matrices(tree: Any) -> Any:
    """Returns a part of a model with its matrices by rows dequantized to fp32, for several products; no matrices of experts.

    A product of many rows dequantizes the whole matrix first. Unchanged if the matrices have more than 2^28 weights together.
    """

    def by_rows(x: Any) -> bool:
        return isinstance(x, Grouped) and x.by_row and x.codes.ndim == 3

    matrices = filter(by_rows, jax.tree.leaves(tree, is_leaf=by_rows))
    if sum(matrix.codes.size for matrix in matrices) > MOST_DENSE:
        return tree
    return jax.tree.map(lambda x: _dense(x) if by_rows(x) else x, tree, is_leaf=by_rows)


@jax.jit
def _dense(matrix: Grouped) -> Float[Array, "O I"]:
    return matrix.weights(jnp.float32).reshape(len(matrix.codes), -1)


def rows(weight: Float[Array, "O I"] | Grouped, ids: Int[Array, "B T"], dtype: str) -> Float[Array, "B T I"]:
    """Returns the rows `ids` of a matrix, as an embedding does; rows of a quantized matrix are returned in `dtype`."""
    if not isinstance(weight, Grouped):
        return jnp.take(weight, ids, axis=0)
    selected = jax.tree.map(lambda x: jnp.take(x, ids, axis=0 if weight.by_row else 1), weight).weights(dtype)
    return (selected if weight.by_row else jnp.moveaxis(selected, 0, -2)).reshape(*ids.shape, -1)


def product(x: Float[Array, "B T I"], weight: Float[Array, "O I"] | Grouped) -> Float[Array, "B T O"]:
    """Returns x W^T in fp32."""
    if not isinstance(weight, Grouped):
        einsum = functools.partial(EINSUM, "bti,oi->bto")
        if 1 < x.shape[0] * x.shape[1] <= MOST_ROWS:
            return lax.platform_dependent(x, weight, cpu=_matrix_first, default=einsum)
        return einsum(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    y = (by_blocks if weight.by_row else at_once)(flat, weight)
    return y.reshape(*x.shape[:2], -1)


def at_once(x: Float[Array, "T I"], weight: Grouped) -> Float[Array, "T O"]:
    """Returns x W^T at once: up to `MOST_ROWS` rows of `x` multiply the codes; more rows multiply the dequantized weights."""
    groups = x.reshape(len(x), weight.codes.shape[0], -1)
    if len(x) > MOST_ROWS:
        return EINSUM("tgi,goi->to", groups, weight.weights(x.dtype))
    # Without the barrier XLA:GPU joins products with the same x into one, and transposes their codes for it.
    groups, codes = lax.optimization_barrier((groups, weight.codes))
    partial = EINSUM("tgi,goi->gto", groups, replace(weight, codes=codes).numbers(x.dtype))
    if weight.zero is not None:
        sums = groups.astype(jnp.float32).sum(-1).T
        partial -= sums[..., None] * weight.zero.astype(jnp.float32)[:, None, :]
    return (partial * weight.scale[:, None, :]).sum(0)


def by_blocks(x: Float[Array, "T I"], weight: Grouped) -> Float[Array, "T O"]:
    """Returns x W^T in fp32, with W by rows, in blocks of rows."""
    count, groups, width = weight.codes.shape
    if len(x) * groups == 1 and weight.codes.dtype == jnp.int8 and weight.zero is None:
        # Here a fused sum takes as long as a product in blocks, and needs no block; for bit patterns it takes twice as long.
        return (weight.codes[:, 0].astype(jnp.float32) * x.astype(jnp.float32)).sum(-1)[None] * weight.scale.T
    weights = BLOCK if len(x) <= MOST_ROWS else LARGE_BLOCK
    size, x = min(max(weights // (groups * width), 1), count), x.astype(jnp.float32)

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        # Both slices clamp the last block to start early enough to be whole.
        block = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, i * size, size), weight)
        # The matrix comes first, as in `_matrix_first`.
        product = EINSUM("oi,ti->ot", block.weights(jnp.float32).reshape(size, -1), x)
        return lax.dynamic_update_slice_in_dim(out, product, i * size, axis=0)

    return lax.fori_loop(0, -(-count // size), fill, jnp.zeros((count, len(x)))).T


def _matrix_first(x: Float[Array, "B T I"], matrix: Float[Array, "O I"]) -> Float[Array, "B T O"]:
    """Returns x W^T of a few rows in half the time: XLA:CPU transposes a matrix that is the second operand."""
    return EINSUM("oi,bti->obt", matrix, x).transpose(1, 2, 0)
