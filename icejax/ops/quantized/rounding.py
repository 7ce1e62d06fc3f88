"""Symmetric quantization of vectors, with one scale each: the largest magnitude becomes the largest code.

Page digests, the pool's page format and quantized checkpoints call it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

TINY = float(jnp.finfo(jnp.float32).tiny)


def quantize(
    x: jax.Array, dtype: str | jnp.dtype, *, axis: int, scale_dtype: str | jnp.dtype = "float32", least: float = TINY
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of `x`, and one scale per vector along `axis`, which has size 1 in the scales.

    Example: [1, -2, 4] in int8 has the scale 4 / 127 and the codes [32, -64, 127].

    Args:
        dtype: dtype of the codes, an integer or a floating-point one.
        least: the smallest scale. Where subnormals are flushed, a scale below TINY is 0, and a zero vector's codes are 0 / 0,
            which becomes 0 in integer dtypes only.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(axis, keepdims=True) / most, least).astype(scale_dtype)
    codes = x / scale.astype(jnp.float32)
    if scale.dtype != x.dtype:  # the scale was rounded, so the largest code may exceed `most`
        codes = jnp.clip(codes, -most, most)
    return (jnp.round(codes) if is_integer else codes).astype(dtype), scale


def dequantize(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the vectors that `quantize` encoded, in fp32, to half a step between codes."""
    return codes.astype(jnp.float32) * scale.astype(jnp.float32)
