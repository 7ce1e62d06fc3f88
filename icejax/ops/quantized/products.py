"""Products x W^T with quantized or dense matrices W [O, I]: a device reads the codes and scales the result.

Linear layers, routers, experts and the embedding call them, with activations [B, T, I].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import EINSUM

MOST_ROWS = 16  # most rows of x that multiply codes directly; for more, the partial sums per group would outgrow the matrix
BLOCK = 2**21  # weights that a CPU converts to fp32 at once: each block costs some 50 us beside its products


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale", "zero"), meta_fields=())
@dataclass(frozen=True)
class Grouped:
    """A quantized matrix [O, I], or one for each expert: rows are cut into G groups of g, and weight = (code - zero) * scale.

    Groups are the first axis: in every other order XLA copies the matrix on some device. An e2m1 matrix that is not one of
    experts is held as int8, its numbers doubled. From codes of 4 bits (float4, or int4 decoded by arithmetic) XLA:GPU would
    make a copy in 16 bits for products of 8 rows: it fuses only a plain cast of the codes into the product, unless
    xla_gpu_experimental_gemm_fusion_v2 is set.

    Example: I = 256 in groups of 64 and O = 8 have codes [4, 8, 64] and scales [4, 8].

    Attributes:
        codes: weights as numbers in a narrow dtype, or as bit patterns of bfloat16 (uint16).
        scale: one factor per group of a row.
        zero: the code of the weight 0 in each group; None: 0.
    """

    codes: jax.Array  # int4, int8, float8_e4m3fn, float4_e2m1fn (experts only) or uint16, [..., G, O, g]
    scale: jax.Array  # f32[..., G, O]
    zero: jax.Array | None  # int8 or f32[..., G, O]

    def numbers(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the codes as unscaled numbers, dtype[..., G, O, g]."""
        if self.codes.dtype != jnp.uint16:
            return self.codes.astype(dtype)
        return lax.bitcast_convert_type(self.codes.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)

    def weights(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the dequantized matrix in groups, dtype[..., G, O, g]."""
        wide = self.numbers(jnp.float32)
        if self.zero is not None:
            wide -= self.zero.astype(jnp.float32)[..., None]
        return (wide * self.scale[..., None]).astype(dtype)


def rows(weight: Float[Array, "O I"] | Grouped, ids: Int[Array, "B T"], dtype: str) -> Float[Array, "B T I"]:
    """Returns the rows `ids` of a matrix, as an embedding does; rows of a quantized matrix are returned in `dtype`."""
    if not isinstance(weight, Grouped):
        return jnp.take(weight, ids, axis=0)
    selected = jax.tree.map(lambda x: jnp.take(x, ids, axis=1), weight).weights(dtype)
    return jnp.moveaxis(selected, 0, -2).reshape(*ids.shape, -1)


def product(x: Float[Array, "B T I"], weight: Float[Array, "O I"] | Grouped) -> Float[Array, "B T O"]:
    """Returns x W^T in fp32."""
    if not isinstance(weight, Grouped):
        einsum = functools.partial(EINSUM, "bti,oi->bto")
        if 1 < x.shape[0] * x.shape[1] <= MOST_ROWS:
            return lax.platform_dependent(x, weight, cpu=_matrix_first, default=einsum)
        return einsum(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    y = lax.platform_dependent(flat, weight, cpu=by_blocks, default=at_once)
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
    """Returns x W^T in fp32, in blocks of the rows of W: a CPU never converts all of W to fp32."""
    groups, count, width = weight.codes.shape
    if len(x) * groups == 1 and weight.codes.dtype == jnp.int8 and weight.zero is None:
        # Here a fused sum takes two thirds of a product's time; for bit patterns or several groups it takes ten times as long.
        return (weight.codes[0].astype(jnp.float32) * x.astype(jnp.float32)).sum(-1)[None] * weight.scale
    size, x = min(max(BLOCK // (groups * width), 1), count), x.astype(jnp.float32).reshape(len(x), groups, width)

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        # Both slices clamp the last block to start early enough to be whole.
        block = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, i * size, size, axis=1), weight)
        return lax.dynamic_update_slice_in_dim(out, _transposed(block, x), i * size, axis=0)

    return lax.fori_loop(0, -(-count // size), fill, jnp.zeros((count, len(x)))).T


def _matrix_first(x: Float[Array, "B T I"], matrix: Float[Array, "O I"]) -> Float[Array, "B T O"]:
    """Returns x W^T of a few rows in half the time: XLA:CPU transposes a matrix that is the second operand."""
    return EINSUM("oi,bti->obt", matrix, x).transpose(1, 2, 0)


def _transposed(weight: Grouped, groups: Float[Array, "T G g"]) -> Float[Array, "O T"]:
    """Returns W x^T, with the matrix as the first operand as in `_matrix_first`."""
    if len(groups) > MOST_ROWS:
        return EINSUM("goi,tgi->ot", weight.weights(groups.dtype), groups)
    wide = weight.numbers(groups.dtype)
    if weight.zero is not None:
        wide -= weight.zero.astype(wide.dtype)[..., None]
    return (EINSUM("goi,tgi->got", wide, groups) * weight.scale[..., None]).sum(0)
