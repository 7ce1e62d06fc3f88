"""Means over neighbours whose number and side differ by head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def shifted_mean(
    x: Float[Array, "B K G S"], inside: Bool[Array, "B K S"], shift: Int[Array, "B K G"], *, kernel: int
) -> Float[Array, "B K G S"]:
    """Returns the mean over `kernel` neighbours around a shifted place; over as many more as the own place needs to be one.

    Past the first and the last place that is `inside` that one is repeated. Places inside are one run.

    Args:
        shift: how many places further right the neighbours are, left below 0.
        kernel: an odd number.
    """
    half = jnp.maximum(kernel // 2, jnp.abs(shift))[..., None]
    places = jnp.arange(x.shape[-1])[None, None, None] + shift[..., None]
    first = jnp.argmax(inside, axis=-1)[..., None, None]
    last = jnp.maximum(first + inside.sum(-1)[..., None, None] - 1, first)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        found = jnp.take_along_axis(x, jnp.clip(places + step, first, last), axis=-1)
        return total + jnp.where(jnp.abs(step) <= half, found, 0)

    most = half.max()
    return jax.lax.fori_loop(-most, most + 1, add, jnp.zeros_like(x)) / (2 * half + 1).astype(x.dtype)
