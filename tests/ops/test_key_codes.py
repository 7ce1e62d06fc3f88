"""Codes of pages in 3 and 8 bits, and with rounded offsets and steps, against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.ops.pages import key_codes
from tests import tolerances
from tests.helpers.run import jitted
from tests.reference import coded as reference

SHAPE = (2, 3, 40, 8)


def drawn(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pages with channels of unlike size, NaN in empty slots, partial and empty pages; and their mask."""
    rng = np.random.default_rng(size)
    x = rng.standard_normal((*SHAPE, size)).astype(np.float32) * np.exp(rng.standard_normal(size)).astype(np.float32) + 2
    mask = np.arange(SHAPE[-1]) < rng.integers(0, SHAPE[-1] + 1, (*SHAPE[:-1], 1))
    return np.where(mask[..., None], x, np.nan).astype(np.float32), mask


@pytest.mark.parametrize("bits", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_odd_and_whole_byte_codes_equal_the_reference(bits):
    k, mask = drawn(21)
    codes = jitted(key_codes.encode_keys, k, mask, bits=bits, scales="float32")
    assert [(x.shape, x.dtype) for x in (codes.low, codes.step)] == 2 * [((*SHAPE[:3], 21), "float32")]
    assert codes.codes.shape[-1] == SHAPE[3] * {3: 6 + 3, 8: 21}[bits]  # of 3 bits, 2 in 6 bytes and 1 in 3
    decoded = np.asarray(jitted(key_codes.decode_keys, codes, page_size=SHAPE[3], bits=bits, dtype="float32"))
    for page in np.ndindex(*SHAPE[:3]):
        if len(keys := k[page][mask[page]]):
            assert_nearest(decoded[page][mask[page]], keys, bits)


def assert_nearest(decoded: np.ndarray, vectors: np.ndarray, bits: int) -> None:
    """Asserts that decoded vectors [n, H] are as far from the true ones as the nearest values of their channels' lines."""
    nearest = reference.distance(vectors, *reference.line(vectors, bits), bits)
    np.testing.assert_allclose(np.abs(decoded - vectors), nearest, rtol=0, atol=tolerances.EXACT)


def rounded(x: np.ndarray, scales: str) -> np.ndarray:
    """Returns a vector in the dtype of offsets and steps: int8 with one scale, or a 16-bit dtype."""
    if scales != "int8":
        return x.astype(jnp.dtype(scales)).astype(np.float32)
    scale = max(np.abs(x).max() / np.float32(127), np.finfo(np.float32).tiny)
    return np.round(x / scale) * scale


@pytest.mark.parametrize(("bits", "scales"), [(2, "int8"), (3, "bfloat16"), (4, "int8"), (4, "float16"), (8, "bfloat16")])
def test_codes_are_chosen_for_the_rounded_line(bits, scales):
    k, mask = drawn(32)
    codes = jitted(key_codes.encode_keys, k, mask, bits=bits, scales=scales)
    width = 32 + 4 if scales == "int8" else 32 * 2
    assert sum(x.nbytes for x in jax.tree.leaves(codes)) == np.prod(SHAPE[:3]) * (SHAPE[3] * 4 * bits + 2 * width)
    decoded = np.asarray(jitted(key_codes.decode_keys, codes, page_size=SHAPE[3], bits=bits, dtype="float32"))
    right = []
    for page in np.ndindex(*SHAPE[:3]):
        if len(keys := k[page][mask[page]]):
            low, step = (rounded(x.astype(np.float32), scales) for x in reference.line(keys, bits))
            nearest = reference.distance(keys, low, step, bits)
            right.append((np.abs(np.abs(decoded[page][mask[page]] - keys) - nearest) < 1e-4).ravel())
    assert np.concatenate(right).mean() > 0.995  # offsets and steps halfway between two numbers may round either way
