"""Attention against float64 softmax over explicit masks."""

import jax.numpy as jnp
import numpy as np
import pytest

from icejax.ops.attention import attend, causal
from tests import tolerances
from tests.run import jitted


def reference(q, k, v, mask):
    """Softmax attention in float64; q [T, N, H], k and v [S, K, H], mask bool[T, S]."""
    out = np.zeros(q.shape)
    for head in range(q.shape[1]):
        kv = head // (q.shape[1] // k.shape[1])
        scores = q[:, head].astype(np.float64) @ k[:, kv].T.astype(np.float64) / q.shape[-1] ** 0.5
        weights = np.where(mask, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
    return out


@pytest.mark.parametrize("window", [None, 1, 100, 700])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_equals_float64(window, kv_heads):
    rng = np.random.default_rng(0)
    lengths, tokens = (1536, 3, 801), 1536
    q = rng.standard_normal((3, tokens, 4, 8)).astype(np.float32) * 3
    k, v = (rng.standard_normal((3, tokens, kv_heads, 8)).astype(np.float32) for _ in range(2))
    for i, length in enumerate(lengths):
        k[i, length:], v[i, length:] = np.nan, np.nan
    found = np.asarray(jitted(lambda *qkv: causal(*qkv, lengths=jnp.asarray(lengths), window=window), q, k, v))
    for i, length in enumerate(lengths):
        query, key = np.arange(length)[:, None], np.arange(length)[None, :]
        mask = (key <= query) & (key > query - (window or tokens))
        expected = reference(q[i, :length], k[i, :length], v[i, :length], mask)
        np.testing.assert_allclose(found[i, :length], expected, rtol=0, atol=tolerances.EXACT)


def test_attend_equals_float64_and_ignores_masked_keys():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 8), (3, 50, 8), (3, 50, 8)))
    mask = rng.random((3, 50)) < 0.5
    dirty = np.where(mask[..., None], k, np.nan)
    found = np.asarray(jitted(attend, q, dirty, v, mask))
    for i in range(3):
        expected = reference(q[i][None], k[i][:, None], v[i][:, None], mask[i][None])[0]
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=tolerances.EXACT)
