"""Rotary position embeddings (arXiv 2104.09864) and the ways families stretch them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from icejax.checks.errors import InputError
from icejax.config import Rope, RopeScaling


def cos_sin(
    positions: Int[Array, "B T"], lengths: Int[Array, " B"], *, rope: Rope
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Returns fp32 cos and sin of every position for the R channels that are rotated, halves repeated, as `rotate` takes them.

    Args:
        positions: token positions from 0.
        lengths: tokens seen so far in each row; only `dynamic` scaling depends on them.
    """
    scaling = rope.scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        frequencies = _dynamic(lengths, scaling, theta=rope.theta, size=rope.size)[:, None, :]
    else:
        frequencies = jnp.asarray(inverse_frequencies(rope))[None, None, :]
    angles = positions[:, :, None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)
    factor = scaling.attention_factor if scaling is not None else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Float[Array, "*B T N H"], cos: Float[Array, "*B T R"], sin: Float[Array, "*B T R"]) -> Float[Array, "*B T N H"]:
    """Returns `x` with its first R channels rotated, in its own dtype; Hugging Face's layout (first half with second half)."""
    wide, rest = x[..., : cos.shape[-1]].astype(jnp.float32), x[..., cos.shape[-1] :]
    first, second = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    rotated = (wide * cos[..., None, :] + turned * sin[..., None, :]).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def halves(x: Float[Array, "*B T N H"], size: int) -> Float[Array, "*B T N H"]:
    """Returns heads whose first `size` channels are pairs to be rotated as `rotate` takes them: the first of each, the second.

    Done to queries and keys alike it leaves their products as they are.
    """
    pairs = x[..., :size].reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1], x[..., size:]], axis=-1)


def grow(q: Float[Array, "*B T N H"], positions: Int[Array, "*B T"], *, rope: Rope) -> Float[Array, "*B T N H"]:
    """Returns queries times what they grow by with their positions, in their own dtype."""
    scaling = rope.scaling
    if scaling is None or not scaling.query_beta:
        return q
    contexts = positions // scaling.original_max_position_embeddings
    factor = 1.0 + scaling.query_beta * jnp.log1p(contexts.astype(jnp.float32))
    return q * factor[..., None, None].astype(q.dtype)


def turn(x: Float[Array, "*B T N H"], by: Int[Array, "*B T"] | Float[Array, "*B T"], *, rope: Rope) -> Float[Array, "*B T N H"]:
    """Returns heads that stand at some positions as they stand `by` further, in their own dtype.

    So does a cache give its keys new positions (StreamingLLM, arXiv 2309.17453). Nothing is scaled: the attention factor of
    `yarn` is in them already.

    Raises:
        InputError: the frequencies are not fixed.
    """
    check_rerotation(rope)
    angles = by[..., None].astype(jnp.float32) * inverse_frequencies(rope).reshape((1,) * by.ndim + (-1,))
    angles = jnp.concatenate([angles, angles], axis=-1)
    return rotate(x, jnp.cos(angles), jnp.sin(angles))


def check_rerotation(rope: Rope) -> None:
    """Raises InputError if such heads cannot be turned to other positions."""
    if rope.scaling is not None and rope.scaling.rope_type == "dynamic":
        raise InputError(
            "keys are given new positions only where RoPE's frequencies are fixed, got rope type 'dynamic', where they change "
            "with the length: use a cache that leaves keys at their positions"
        )


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Returns the fp32 inverse frequencies [R / 2] of every scaling but `dynamic`."""
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
            turned = np.arange(size // 2) < int(scaling.part * size // 2)
            return np.where(turned, plain / np.float32(scaling.factor), np.float32(0))
        case "longrope":
            return plain / np.asarray(scaling.factors, np.float32)
    raise ValueError(f"rope_type {scaling.rope_type!r} has no fixed frequencies")


def _dynamic(lengths: jax.Array, scaling: RopeScaling, *, theta: float, size: int) -> jax.Array:
    """NTK by length: the base grows once a text is longer than the trained context."""
    trained = scaling.original_max_position_embeddings
    seen = jnp.maximum(lengths, trained).astype(jnp.float32)
    stretch = scaling.factor * seen / trained - (scaling.factor - 1.0)
    base = theta * stretch ** (size / (size - 2))
    return 1.0 / base[:, None] ** (jnp.arange(0, size, 2, dtype=jnp.float32) / size)[None, :]


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, the band between blended (Llama 3.1)."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * plain / scaling.factor + blend * plain).astype(np.float32)


def _yarn(plain: np.ndarray, scaling: RopeScaling, *, theta: float, size: int) -> np.ndarray:
    """NTK by parts: a ramp over dimensions from interpolation to extrapolation (arXiv 2309.00071 section 3.2)."""

    def dimension(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)
