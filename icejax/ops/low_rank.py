"""Vectors as far as few directions hold them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.ops.attention.dense import EINSUM


def low_rank(x: Float[Array, "B n d"], rank: int) -> Float[Array, "B n d"]:
    """Returns the nearest vectors in fp32 that span no more than `rank` directions, as a truncated SVD has them.

    The directions are those of the largest eigenvalues of the products of channels: an SVD of as many vectors as a long text
    has would take their number times as much memory.
    """
    x = x.astype(jnp.float32)
    main = jnp.linalg.eigh(EINSUM("bnd,bne->bde", x, x))[1][..., -rank:]  # in rising order
    return EINSUM("bnr,bdr->bnd", EINSUM("bnd,bdr->bnr", x, main), main)
