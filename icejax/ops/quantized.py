"""Products with matrices that stand as codes: the codes are read as they are, and scaled behind the product."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.ops.attention import EINSUM

MOST_ROWS = 16  # of a product that takes codes; what it leaves of each group would outgrow the matrix with more


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale", "zero"), meta_fields=())
@dataclass(frozen=True)
class Grouped:
    """A matrix [O, I] whose rows are cut into G groups of g, or one of each expert: a weight is (its code - zero) times scale.

    Groups come first: in this form alone XLA copies the matrix for no device.
    """

    codes: jax.Array  # int4, int8, float8_e4m3fn, or of experts float4_e2m1fn, [..., G, O, g]
    scale: jax.Array  # f32[..., G, O]
    zero: jax.Array | None  # int8[..., G, O]; None: 0

    def weights(self, dtype: jnp.dtype) -> jax.Array:
        """Returns the matrix in groups, dtype[..., G, O, g]."""
        wide = self.codes.astype(jnp.float32)
        if self.zero is not None:
            wide -= self.zero.astype(jnp.float32)[..., None]
        return (wide * self.scale[..., None]).astype(dtype)


def product(x: Float[Array, "B T I"], weight: Float[Array, "O I"] | Grouped) -> Float[Array, "B T O"]:
    """Returns x times the transposed matrix, in fp32."""
    if not isinstance(weight, Grouped):
        return EINSUM("bti,oi->bto", x, weight)
    groups = x.reshape(*x.shape[:2], weight.codes.shape[0], -1)
    if x.shape[0] * x.shape[1] > MOST_ROWS:
        return EINSUM("btgi,goi->bto", groups, weight.weights(x.dtype))
    # Or XLA:GPU makes one product of several with the same x, and transposes their codes for it.
    groups, codes = jax.lax.optimization_barrier((groups, weight.codes))
    each = EINSUM("btgi,goi->gbto", groups, codes.astype(x.dtype))
    if weight.zero is not None:
        sums = groups.astype(jnp.float32).sum(-1).transpose(2, 0, 1)
        each -= sums[..., None] * weight.zero.astype(jnp.float32)[:, None, None, :]
    return (each * weight.scale[:, None, None, :]).sum(0)
