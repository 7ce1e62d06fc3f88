"""Means of scores [B, K, G, S] over neighbouring keys, with a shift and a width per query head; the policy ReSTKV calls it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def shifted_mean(
    x: Float[Array, "B K G S"], inside: Bool[Array, "B K S"], shift: Int[Array, "B K G"], *, kernel: int
) -> Float[Array, "B K G S"]:
    """Returns for each place the mean over the neighbours of the place `shift` to its right.

    The mean runs from -h to h around the shifted place, h = max(kernel // 2, |shift|), so that it covers the place itself.
    Beyond the first and the last place `inside`, the value of that place is repeated.

    Example: kernel 3 and shift 2 give h = 2. The mean for place 5 covers places 5 to 9, around 7; if place 8 is the last
    inside, it is (x[5] + x[6] + x[7] + x[8] + x[8]) / 5.

    Args:
        inside: the places that hold a key; they are contiguous.
        shift: places to the right; a negative shift is to the left.
        kernel: an odd number.
    """
    half = jnp.maximum(kernel // 2, jnp.abs(shift))[..., None]
    places = jnp.arange(x.shape[-1])[None, None, None] + shift[..., None]
    first = jnp.argmax(inside, axis=-1)[..., None, None]
    last = jnp.maximum(first + inside.sum(-1)[..., None, None] - 1, first)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        values = jnp.take_along_axis(x, jnp.clip(places + step, first, last), axis=-1)
        return total + jnp.where(jnp.abs(step) <= half, values, 0)

    widest = half.max()
    return jax.lax.fori_loop(-widest, widest + 1, add, jnp.zeros_like(x)) / (2 * half + 1).astype(x.dtype)
