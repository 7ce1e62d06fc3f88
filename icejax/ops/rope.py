"""Rotary position embeddings (RoPE, arXiv 2104.09864) and their scalings; attention layers call it on heads [B, T, N, H]."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.checks.errors import InputError
from icejax.config import Rope, RopeScaling


def cos_sin(
    positions: Int[Array, "B T"], lengths: Int[Array, " B"], *, rope: Rope
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Returns fp32 cos and sin of every position for the R rotated channels, in the layout of `rotate`: R / 2 values, twice.

    Example: size 4 and theta 10000 give the frequencies 1 and 0.01, so the angles of position 3 are [3, 0.03, 3, 0.03].

    Args:
        positions: token positions from 0.
        lengths: tokens of each row so far; only `dynamic` and `longrope` scaling depend on them.
    """
    scaling = rope.scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        frequencies = _dynamic(lengths, scaling, theta=rope.theta, size=rope.size)[:, None, :]
    elif scaling is not None and scaling.rope_type == "longrope":
        frequencies = _longrope(lengths, rope)[:, None, :]
    else:
        frequencies = jnp.asarray(inverse_frequencies(rope))[None, None, :]
    angles = positions[:, :, None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    factor = scaling.attention_factor if scaling is not None else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Float[Array, "*B T N H"], cos: Float[Array, "*B T R"], sin: Float[Array, "*B T R"]) -> Float[Array, "*B T N H"]:
    """Returns `x` with its first R channels rotated, in its dtype; channel i is paired with i + R / 2, as in Hugging Face."""
    channels, rest = x[..., : cos.shape[-1]].astype(jnp.float32), x[..., cos.shape[-1] :]
    first, second = jnp.split(channels, 2, axis=-1)
    crossed = jnp.concatenate([-second, first], axis=-1)
    rotated = (channels * cos[..., None, :] + crossed * sin[..., None, :]).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def deinterleave(x: Float[Array, "*B T N H"], size: int) -> Float[Array, "*B T N H"]:
    """Returns heads with their first `size` channels reordered from neighbouring pairs to the two halves that `rotate` takes.

    Example: size 4 turns channels [a0, a1, b0, b1, c] into [a0, b0, a1, b1, c]. Products of queries and keys do not change if
    both are reordered.
    """
    pairs = x[..., :size].reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1], x[..., size:]], axis=-1)


def scale_queries(q: Float[Array, "*B T N H"], positions: Int[Array, "*B T"], *, rope: Rope) -> Float[Array, "*B T N H"]:
    """Returns queries times 1 + query_beta ln(1 + n), n = position // original context, in their dtype (Ministral 3)."""
    scaling = rope.scaling
    if scaling is None or not scaling.query_beta:
        return q
    contexts = positions // scaling.original_max_position_embeddings
    factor = 1.0 + scaling.query_beta * jnp.log1p(contexts.astype(jnp.float32))
    return q * factor[..., None, None].astype(q.dtype)


def rerotate(
    x: Float[Array, "*#B T N H"], by: Int[Array, "*#B T"] | Float[Array, "*#B T"], lengths: Int[Array, "*#B"], *, rope: Rope
) -> Float[Array, "*#B T N H"]:
    """Returns heads after RoPE as if their tokens stood `by` positions later, in their dtype.

    A cache gives its keys new positions with it (StreamingLLM, arXiv 2309.17453). The attention factor of `yarn` is not
    applied: the heads hold it already.

    Args:
        lengths: tokens of each row so far, as for `cos_sin`.

    Raises:
        InputError: the frequencies change with every token.
    """
    check_rerotation(rope)
    if rope.scaling is not None and rope.scaling.rope_type == "longrope":
        frequencies = _longrope(lengths, rope)[..., None, :]
        x = jnp.broadcast_to(x, (*lengths.shape, *x.shape[-3:]))
    else:
        frequencies = inverse_frequencies(rope).reshape((1,) * by.ndim + (-1,))
    angles = by[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    return rotate(x, jnp.cos(angles), jnp.sin(angles))


def check_rerotation(rope: Rope) -> None:
    """Raises InputError if rotated heads cannot be moved to other positions, because the frequencies depend on the length."""
    if rope.scaling is not None and rope.scaling.rope_type == "dynamic":
        raise InputError(
            "keys are given new positions only where RoPE's frequencies are fixed, got rope type 'dynamic', where they change "
            "with the length: use a cache that leaves keys at their positions"
        )


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Returns the fp32 inverse frequencies [R / 2], theta^(-2 i / R) before scaling; those of long texts for `longrope`.

    Raises:
        ValueError: the scaling is `dynamic`, whose frequencies depend on the length.
    """
    size, theta, scaling = rope.size, rope.theta, rope.scaling
    plain = (1.0 / theta ** (np.arange(0, size, 2, dtype=np.float64) / size)).astype(np.float32)
    match scaling.rope_type if scaling is not None else None:
        case None:
            return plain
        case "linear":
            return plain / np.float32(scaling.factor)
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, scaling, theta=theta, size=size)
        case "proportional":
            rotated = np.arange(size // 2) < int(scaling.part * size // 2)
            return np.where(rotated, plain / np.float32(scaling.factor), np.float32(0))
        case "longrope":
            return plain / np.asarray(scaling.factors, np.float32)
    raise ValueError(f"rope_type {scaling.rope_type!r} has no fixed frequencies")


def _longrope(lengths: jax.Array, rope: Rope) -> jax.Array:
    """Returns LongRoPE's frequencies f32[B, R / 2]: the long ones for rows that are longer than the original context."""
    scaling = rope.scaling
    short = inverse_frequencies(replace(rope, scaling=replace(scaling, factors=scaling.short_factors)))
    return jnp.where(lengths[..., None] > scaling.original_max_position_embeddings, inverse_frequencies(rope), short)


def _dynamic(lengths: jax.Array, scaling: RopeScaling, *, theta: float, size: int) -> jax.Array:
    """Returns frequencies of NTK scaling by length, f32[B, R / 2]: theta grows once a text exceeds the trained context."""
    trained = scaling.original_max_position_embeddings
    seen = jnp.maximum(lengths, trained).astype(jnp.float32)
    stretch = scaling.factor * seen / trained - (scaling.factor - 1.0)
    base = theta * stretch ** (size / (size - 2))
    return 1.0 / base[:, None] ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size)[None, :]


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns Llama 3.1's frequencies: low ones are divided by the factor, high ones stay, the band between is blended."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * plain / scaling.factor + blend * plain).astype(np.float32)


def _yarn(plain: np.ndarray, scaling: RopeScaling, *, theta: float, size: int) -> np.ndarray:
    """Returns frequencies of NTK by parts: a ramp from unscaled to divided by the factor (arXiv 2309.00071 section 3.2)."""

    def dimension(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)
