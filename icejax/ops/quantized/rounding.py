"""Vectors in a narrow dtype with the scale of each: symmetric, the largest number becomes the largest code."""

from __future__ import annotations

import jax
import jax.numpy as jnp

TINY = float(jnp.finfo(jnp.float32).tiny)


def quantize(
    x: jax.Array, dtype: str | jnp.dtype, *, axis: int, scale_dtype: str | jnp.dtype = "float32", least: float = TINY
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of `x`, and the scales of the vectors along `axis`, an axis of 1 there.

    Args:
        dtype: of the codes, an integer or a floating-point one.
        least: the smallest scale. One below TINY is 0 where subnormal numbers are flushed: then 0 / 0 is a code, 0 of integers.
    """
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(axis, keepdims=True) / most, least).astype(scale_dtype)
    codes = x / scale.astype(jnp.float32)
    if scale.dtype != x.dtype:  # rounded, so the largest number may be too large for it
        codes = jnp.clip(codes, -most, most)
    return (jnp.round(codes) if whole else codes).astype(dtype), scale


def dequantize(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns what `quantize` was given, in fp32, to half a step between codes."""
    return codes.astype(jnp.float32) * scale.astype(jnp.float32)
