"""Codes of 2, 4 or 8 bits for groups of 32 numbers: the formats of llama.cpp's and KIVI's quantised caches.

The quantised caches of all tokens (`policies/llama_cpp.py`, `policies/kivi.py`) encode keys and values with them, and decode
them in every step. A group is an axis of 32 numbers with a scale in fp16, and in KIVI's format also the least number.

Example: 4 bits pack the codes 0 to 31 of a group into 16 bytes; byte j holds code j in its low half and code j + 16 in its high
half.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt

GROUP = 32  # numbers that share a scale, in llama.cpp's formats and in KIVI's code
DECODED = 2048  # slots that a step decodes at a time; a whole cache in fp32 would outgrow its codes
LARGEST = float(jnp.finfo(jnp.float16).max)


def grouped(x: Float[Array, "*R H"]) -> Float[Array, "*R C 32"]:
    """Returns the last axis in groups; the last channel fills up the last group, which changes no extreme of a group."""
    missing = -x.shape[-1] % GROUP
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode="edge")
    return x.reshape(*x.shape[:-1], -1, GROUP)


def groups_of(size: int) -> int:
    """Returns how many groups `size` channels take."""
    return -(-size // GROUP)


def pack(codes: UInt[Array, "*codes"], bits: int, axis: int = -1) -> UInt[Array, "*bytes"]:
    """Returns codes below 2^bits packed into bytes along an axis of 32 codes."""
    parts = jnp.split(codes, 8 // bits, axis)
    return functools.reduce(operator.or_, (part << i * bits for i, part in enumerate(parts)))


def unpack(packed: UInt[Array, "*bytes"], bits: int, axis: int = -1) -> UInt[Array, "*codes"]:
    """Returns the codes that `pack` packed."""
    return jnp.concatenate([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)], axis)


def encode_q8_0(x: Float[Array, "*R 32"]) -> tuple[Int[Array, "*R 32"], Float[Array, "*R"]]:
    """Returns llama.cpp's Q8_0 of groups: codes -127 to 127, and the scale, the largest magnitude / 127.

    Codes are those of the unrounded scale, halves away from 0 (`quantize_row_q8_0_ref` in ggml-quants.c).
    """
    x = x.astype(jnp.float32)
    scale = _divided(jnp.abs(x).max(-1), 127)
    ratio = jnp.minimum(jnp.abs(x) * _inverse(scale)[..., None], 127)
    whole = jnp.floor(ratio)
    codes = jnp.sign(x) * (whole + jnp.floor(2 * (ratio - whole)))  # lax.round makes 11 of 10.499999 on XLA:CPU
    return codes.astype(jnp.int8), scale.astype(jnp.float16)


def decode_q8_0(codes: Int[Array, "*R 32"], scale: Float[Array, "*R"]) -> Float[Array, "*R 32"]:
    """Returns the numbers that Q8_0 codes stand for, in fp32."""
    return codes.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


def encode_q4_0(x: Float[Array, "*R 32"]) -> tuple[UInt[Array, "*R 16"], Float[Array, "*R"]]:
    """Returns llama.cpp's Q4_0 of groups: codes 0 to 15 for -8 to 7, and the scale, the number of largest magnitude / -8.

    Codes are those of the unrounded scale (`quantize_row_q4_0_ref` in ggml-quants.c). The first of equal magnitudes counts.
    """
    x = x.astype(jnp.float32)
    largest = jnp.take_along_axis(x, jnp.abs(x).argmax(-1, keepdims=True), axis=-1)[..., 0]
    scale = largest / -8
    # The bounds change nothing but keep the product apart from the sum: fused, both would round once, and ggml rounds twice.
    ratio = jnp.clip(x * _inverse(scale)[..., None], -8, 8)
    codes = jnp.minimum(jnp.floor(ratio + 8.5), 15)
    return pack(codes.astype(jnp.uint8), 4), scale.astype(jnp.float16)


def decode_q4_0(codes: UInt[Array, "*R 16"], scale: Float[Array, "*R"]) -> Float[Array, "*R 32"]:
    """Returns the numbers that Q4_0 codes stand for, in fp32."""
    return (unpack(codes, 4).astype(jnp.float32) - 8) * scale.astype(jnp.float32)[..., None]


def encode_evenly(
    x: Float[Array, "*x"], bits: int, axis: int = -1
) -> tuple[UInt[Array, "*bytes"], Float[Array, "*groups"], Float[Array, "*groups"]]:
    """Returns KIVI's codes of groups along `axis`, and the least number and the step of each group.

    Codes go evenly from the least number to the largest and are those of the unrounded numbers, halves to even
    (`quant/new_pack.py` in KIVI's repository). Least and step are fp16, as in a model of fp16.
    """
    x = x.astype(jnp.float32)
    least, largest = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = _divided(largest - least, 2**bits - 1)
    codes = jnp.clip(jnp.round((x - least) / jnp.where(step == 0, 1, step)), 0, 2**bits - 1)
    stored = (jnp.clip(y, -LARGEST, LARGEST).astype(jnp.float16).squeeze(axis) for y in (least, step))
    return pack(codes.astype(jnp.uint8), bits, axis), *stored


def decode_evenly(
    codes: UInt[Array, "*bytes"], least: Float[Array, "*groups"], step: Float[Array, "*groups"], bits: int, axis: int = -1
) -> Float[Array, "*x"]:
    """Returns the numbers that KIVI's codes stand for, in fp32."""
    least, step = (jnp.expand_dims(y.astype(jnp.float32), axis) for y in (least, step))
    return unpack(codes, bits, axis).astype(jnp.float32) * step + least


def hadamard(x: Shaped[Array, "*R H"], size: int) -> Float[Array, "*R H"]:
    """Returns `x` with every `size` channels turned by the orthonormal Hadamard matrix, its own inverse, in fp32.

    Example: of size 2 the channels (3, 1) become (4, 2) / sqrt(2).
    """
    matrix = jnp.ones((1, 1), jnp.float32)
    while len(matrix) < size:
        matrix = jnp.block([[matrix, matrix], [matrix, -matrix]])
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, size)
    turned = jnp.einsum("...h,hk->...k", parts, matrix * size**-0.5, precision=jax.lax.Precision.HIGHEST)
    return turned.reshape(x.shape)


def _inverse(scale: Float[Array, "*R"]) -> Float[Array, "*R"]:
    return jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))


def _divided(x: Float[Array, "*x"], by: int) -> Float[Array, "*x"]:
    """Returns x / by for x >= 0: of a constant alone XLA would take the inverse, which rounds twice."""
    return x / jnp.where(x > 0, by, 1)
