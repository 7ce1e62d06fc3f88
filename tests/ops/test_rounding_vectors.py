"""Rounding vectors to int8 or fp8: the error is at most half a step at any magnitude, and zeros stay zeros."""

import jax.numpy as jnp
import numpy as np
import pytest

from icejax.ops.quantized.rounding import TINY, dequantize, quantize
from tests.helpers.run import jitted


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype, least", [("int8", TINY), ("int8", TINY / 127), ("float8_e4m3fn", TINY)])
def test_numbers_are_within_half_a_step_at_any_size(dtype, axis, least, scale_dtype):
    rng = np.random.default_rng(0)
    x = np.swapaxes(rng.standard_normal((3, 40, 16)) * 10.0 ** rng.integers(-30, 30, (3, 40, 1)), -1, axis).astype(np.float32)
    x[0] = 0
    codes, scale = jitted(quantize, x, dtype=dtype, axis=axis, scale_dtype=scale_dtype, least=least)
    assert (codes.dtype, scale.dtype) == (dtype, scale_dtype) and scale.shape[axis] == 1 and scale.size == 3 * 40
    rounded, largest = np.asarray(jitted(dequantize, codes, scale), np.float64), np.abs(x).max(axis, keepdims=True)
    assert (rounded[0] == 0).all()
    # int8 has equal steps, fp8 steps of 1/8 of the number; a scale rounded down clips the largest numbers.
    step = largest / 127 if dtype == "int8" else np.maximum(np.abs(x) / 8, largest / 448 / 2**9)
    cut = 0 if scale_dtype == "float32" else np.maximum(np.abs(x) - largest * (1 - 2.0**-8), 0)
    assert (np.abs(rounded - x) <= (0.5 * step * (1 + 2.0**-8) + cut) * (1 + 1e-6)).all()
    assert np.abs(np.asarray(codes.astype(jnp.float32))).max() == (127 if dtype == "int8" else 448)
