"""Products with matrices that stand as codes: a device reads the codes as they are, and scales behind the product."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from icejax.ops.attention.dense import EINSUM

MOST_ROWS = 16  # of a product that takes codes; what it leaves of each group would outgrow the matrix with more
BLOCK = 2**21  # numbers of a matrix that a CPU widens at once: each block costs some 50 us beside its products


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale", "zero"), meta_fields=())
@dataclass(frozen=True)
class Grouped:
    """A matrix [O, I] whose rows are cut into G groups of g, or one of each expert: a weight is (its code - zero) times scale.

    Groups come first: in this form alone XLA copies the matrix for no device. A dense matrix of e2m1 stands as int8, of its
    numbers doubled. In four bits, as float4 or as int4 whose numbers are told by arithmetic, XLA:GPU copies it in 16 bits for 8
    rows: its product fuses a cast of codes and no more, but with xla_gpu_experimental_gemm_fusion_v2.
    """

    codes: jax.Array  # int4, int8, float8_e4m3fn, of experts float4_e2m1fn, or uint16: bfloat16's bits, [..., G, O, g]
    scale: jax.Array  # f32[..., G, O]
    zero: jax.Array | None  # int8[..., G, O]; None: 0

    def numbers(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the codes as numbers, dtype[..., G, O, g]."""
        if self.codes.dtype != jnp.uint16:
            return self.codes.astype(dtype)
        return lax.bitcast_convert_type(self.codes.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)

    def weights(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the matrix in groups, dtype[..., G, O, g]."""
        wide = self.numbers(jnp.float32)
        if self.zero is not None:
            wide -= self.zero.astype(jnp.float32)[..., None]
        return (wide * self.scale[..., None]).astype(dtype)


def rows(weight: Float[Array, "O I"] | Grouped, ids: Int[Array, "B T"], dtype: str) -> Float[Array, "B T I"]:
    """Returns some rows of a matrix."""
    if not isinstance(weight, Grouped):
        return jnp.take(weight, ids, axis=0)
    taken = jax.tree.map(lambda x: jnp.take(x, ids, axis=1), weight).weights(dtype)
    return jnp.moveaxis(taken, 0, -2).reshape(*ids.shape, -1)


def product(x: Float[Array, "B T I"], weight: Float[Array, "O I"] | Grouped) -> Float[Array, "B T O"]:
    """Returns x times the transposed matrix, in fp32."""
    if not isinstance(weight, Grouped):
        plain = functools.partial(EINSUM, "bti,oi->bto")
        if 1 < x.shape[0] * x.shape[1] <= MOST_ROWS:
            return lax.platform_dependent(x, weight, cpu=_matrix_first, default=plain)
        return plain(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    y = lax.platform_dependent(flat, weight, cpu=by_blocks, default=at_once)
    return y.reshape(*x.shape[:2], -1)


def at_once(x: Float[Array, "T I"], weight: Grouped) -> Float[Array, "T O"]:
    """Returns the product by the whole matrix: with few rows by its codes."""
    groups = x.reshape(len(x), weight.codes.shape[0], -1)
    if len(x) > MOST_ROWS:
        return EINSUM("tgi,goi->to", groups, weight.weights(x.dtype))
    # Or XLA:GPU makes one product of several with the same x, and transposes their codes for it.
    groups, codes = lax.optimization_barrier((groups, weight.codes))
    each = EINSUM("tgi,goi->gto", groups, replace(weight, codes=codes).numbers(x.dtype))
    if weight.zero is not None:
        sums = groups.astype(jnp.float32).sum(-1).T
        each -= sums[..., None] * weight.zero.astype(jnp.float32)[:, None, :]
    return (each * weight.scale[:, None, :]).sum(0)


def by_blocks(x: Float[Array, "T I"], weight: Grouped) -> Float[Array, "T O"]:
    """Returns the product in fp32 by some rows of the matrix after the other: a CPU never widens all of it."""
    groups, count, width = weight.codes.shape
    if len(x) * groups == 1 and weight.codes.dtype == jnp.int8 and weight.zero is None:
        # A sum widens what it takes, in two thirds of the time; of bits or of several groups it takes ten times as long.
        return (weight.codes[0].astype(jnp.float32) * x.astype(jnp.float32)).sum(-1)[None] * weight.scale
    size, x = min(max(BLOCK // (groups * width), 1), count), x.astype(jnp.float32).reshape(len(x), groups, width)

    def fill(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last block begins early enough to be whole: both slices see to that alike.
        block = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, i * size, size, axis=1), weight)
        return lax.dynamic_update_slice_in_dim(out, _turned(block, x), i * size, axis=0)

    return lax.fori_loop(0, -(-count // size), fill, jnp.zeros((count, len(x)))).T


def _matrix_first(x: Float[Array, "B T I"], matrix: Float[Array, "O I"]) -> Float[Array, "B T O"]:
    """Returns the product of a few rows in half the time: XLA:CPU transposes a matrix that comes second."""
    return EINSUM("oi,bti->obt", matrix, x).transpose(1, 2, 0)


def _turned(weight: Grouped, groups: Float[Array, "T G g"]) -> Float[Array, "O T"]:
    """Returns the transposed product, with the matrix first as in `_matrix_first`."""
    if len(groups) > MOST_ROWS:
        return EINSUM("goi,tgi->ot", weight.weights(groups.dtype), groups)
    wide = weight.numbers(groups.dtype)
    if weight.zero is not None:
        wide -= weight.zero.astype(wide.dtype)[..., None]
    return (EINSUM("goi,tgi->got", wide, groups) * weight.scale[..., None]).sum(0)
