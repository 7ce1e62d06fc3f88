"""Low-rank approximation of vectors [B, n, d] by a truncated SVD; the ShadowKV policy calls it for keys."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from icejax.ops.attention.dense import EINSUM


def low_rank(x: Float[Array, "B n d"], rank: int) -> Float[Array, "B n d"]:
    """Returns the projection of `x` on its first `rank` right singular vectors, in fp32.

    The singular vectors are computed as eigenvectors of x^T x [B, d, d]: an SVD of the n vectors of a long text would take far
    more memory.
    """
    x = x.astype(jnp.float32)
    directions = jnp.linalg.eigh(EINSUM("bnd,bne->bde", x, x))[1][..., -rank:]  # eigenvalues rise
    return EINSUM("bnr,bdr->bnd", EINSUM("bnd,bdr->bnr", x, directions), directions)
