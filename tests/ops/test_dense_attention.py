"""Dense and blockwise attention, and its log-sum-exp, against a float64 softmax over explicit masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.ops.attention.causal import causal
from icejax.ops.attention.dense import (
    Scoring,
    attend_all,
    attend_first,
    attend_slots,
    attend_with_lse,
    causal_with_lse,
    merge_by_lse,
)
from tests import tolerances
from tests.helpers import dense
from tests.helpers.run import jitted


def draw(lengths, tokens, *, kv_heads, scale=1.0, wide=8):
    """Returns q f32[B, T, 4, 8], k f32[B, T, K, 8], v f32[B, T, K, `wide`], NaN past each length."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((len(lengths), tokens, 4, 8)).astype(np.float32) * np.float32(scale)
    k, v = (rng.standard_normal((len(lengths), tokens, kv_heads, size)).astype(np.float32) for size in (8, wide))
    for x in (q, k, v):
        for i, length in enumerate(lengths):
            x[i, length:] = np.nan
    return q, k, v


@pytest.mark.parametrize(
    ("kv_heads", "scale", "wide", "softcap", "window"),
    [
        (1, 3, 6, 2.0, 700),
        *(
            pytest.param(*heads, window, marks=pytest.mark.slow)
            for heads, window in (
                ((1, 3, 6, None), 100),
                ((4, 3, 8, 2.0), 700),
                ((2, 0.3, 12, None), None),
                ((4, 3, 8, 2.0), None),
                ((1, 3, 6, None), 1),
                ((2, 0.3, 12, None), 100),
                ((2, 0.3, 12, None), 700),
            )
        ),
    ],
)
def test_causal_equals_float64(kv_heads, scale, wide, softcap, window):
    lengths, tokens = (1536, 3, 801), 1536
    qkv = draw(lengths, tokens, kv_heads=kv_heads, scale=scale, wide=wide)
    scoring = Scoring(8**-0.5, softcap)
    actual = jitted(lambda *qkv: causal(*qkv, lengths=jnp.asarray(lengths), window=window, scoring=scoring), *qkv)
    assert actual.out.dtype == actual.lse.dtype == jnp.float32
    for i, length in enumerate(lengths):
        expected = dense.attention(*(x[i, :length] for x in qkv), dense.causal(length, window), softcap)
        for value, reference in zip(actual, expected, strict=True):
            np.testing.assert_allclose(value[i, :length], reference, rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("window", [None, 10])
def test_causal_asks_cudnn_for_the_same(monkeypatch, window):
    """JAX's own implementation stands in for cuDNN's, which needs a GPU; both take the same options and return the same."""
    original, implementations = jax.nn.dot_product_attention, []

    def on_cpu(*qkv, implementation, **options):
        implementations.append(implementation)
        with jax.numpy_dtype_promotion("standard"):
            return original(*qkv, implementation="xla", **options)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    lengths = (48, 3, 21)
    qkv = [jnp.asarray(x, jnp.bfloat16) for x in draw(lengths, 48, kv_heads=2, scale=3)]
    scoring = Scoring(8**-0.5)
    actual = jitted(lambda *qkv: causal(*qkv, lengths=jnp.asarray(lengths, jnp.int32), window=window, scoring=scoring), *qkv)
    assert implementations == ["cudnn"] and (actual.out.dtype, actual.lse.dtype) == (jnp.bfloat16, jnp.float32)
    for i, length in enumerate(lengths):
        expected = dense.attention(*(np.asarray(x[i, :length], np.float64) for x in qkv), dense.causal(length, window))
        for value, reference in zip(actual, expected, strict=True):
            np.testing.assert_allclose(np.asarray(value[i, :length], np.float64), reference, rtol=0, atol=tolerances.HALF)


@pytest.mark.parametrize(("wide", "softcap"), [(16, None), (8, 2.0)])
def test_cudnn_is_not_asked_for_what_it_cannot_do(monkeypatch, wide, softcap):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *_, **__: pytest.fail("cuDNN has no such form"))
    qkv = [jnp.asarray(x, jnp.bfloat16) for x in draw((16,), 16, kv_heads=2, wide=wide)]
    options = dict(lengths=jnp.asarray([16], jnp.int32), window=None, scoring=Scoring(8**-0.5, softcap))
    actual = jitted(lambda *qkv: causal(*qkv, **options), *qkv)
    assert actual.out.dtype == jnp.bfloat16 and actual.out.shape == (1, 16, 4, wide)


@pytest.mark.parametrize(("wide", "softcap"), [(6, None), (8, 2.0), (12, None)])
def test_text_behind_a_cache_equals_float64(wide, softcap):
    """New tokens attend to one another and to the cached keys within a window; both outputs are merged by log-sum-exp."""
    before, tokens, window, scoring = 40, 24, 30, Scoring(8**-0.5, softcap)
    q, k, v = draw((before + tokens,), before + tokens, kv_heads=2, scale=3, wide=wide)

    def attend_behind(q, k, v):
        new = (x[:, before:] for x in (q, k, v))
        among_new = causal_with_lse(*new, lengths=jnp.asarray([tokens]), window=window, scoring=scoring)
        cached = (x[:, :before].swapaxes(1, 2) for x in (k, v))
        in_window = jnp.arange(before, before + tokens)[None, :, None] - jnp.arange(before)[None, None] < window
        return merge_by_lse(
            *among_new, *attend_all(q[:, before:], *cached, jnp.ones((1, 2, before), bool), in_window, scoring=scoring)
        )

    expected = dense.attention(q[0], k[0], v[0], dense.causal(before + tokens, window), softcap)
    for value, reference in zip(jitted(attend_behind, q, k, v), expected, strict=True):
        np.testing.assert_allclose(value[0], reference[before:], rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("seen", "slots"), [((40, 3), 64), ((600, 0), 700), ((530, 511), 554)])
def test_attention_to_slots_equals_float64(seen, slots, window):
    """Slots past a row's tokens hold large values; the last block of slots is shorter than the others."""
    tokens, softcap = 24, 2.0
    rows = [draw((before + tokens,), before + tokens, kv_heads=2, scale=3, wide=6) for before in seen]
    q = np.concatenate([q[:, before:] for (q, _, _), before in zip(rows, seen, strict=True)])
    k, v = (np.full((2, 2, slots, size), 1e4, np.float32) for size in (8, 6))
    for row, before, (_, keys, values) in zip(range(2), seen, rows, strict=True):
        for cached, x in ((k, keys), (v, values)):
            cached[row, :, : before + tokens] = x[0].swapaxes(0, 1)
    options = dict(lengths=jnp.asarray([tokens] * 2), window=window, scoring=Scoring(8**-0.5, softcap))
    actual = jitted(lambda *qkv: attend_slots(*qkv, seen=jnp.asarray(seen), **options), q, k, v)
    for row, (before, qkv) in enumerate(zip(seen, rows, strict=True)):
        expected = dense.attention(*(x[0] for x in qkv), dense.causal(before + tokens, window), softcap)
        for value, reference in zip(actual, expected, strict=True):
            np.testing.assert_allclose(value[row], reference[before:], rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize("last", [(300, 5, 0), (700, 1700, 2559), (2559, 2600, 2559)])  # blocks, all slots, a full ring
def test_attention_to_the_first_slots_equals_float64_and_reads_no_later_block(last):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 8), (3, 2560, 8), (3, 2560, 6)))
    unread = v.copy()
    if max(last) < 512:
        unread[:, 512:] = np.nan  # times a weight of 0 it would be NaN
    scoring = Scoring(8**-0.5, 2.0)
    actual = jitted(attend_first, q, k, unread, np.asarray(last, np.int32), scoring=scoring)
    for i, end in enumerate(last):
        mask = (np.arange(2560) <= end)[None]
        expected = dense.attention(q[i][None], k[i][:, None], v[i][:, None], mask, 2.0)
        for value, reference in zip(actual, expected, strict=True):
            np.testing.assert_allclose(value[i], reference[0], rtol=0, atol=tolerances.EXACT)


@pytest.mark.parametrize(("wide", "softcap"), [(6, None), (8, 2.0), (12, None)])
def test_attend_equals_float64_and_ignores_masked_keys(wide, softcap):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 2, 8), (3, 50, 8), (3, 50, wide)))
    mask = rng.random((3, 50)) < 0.5
    masked_keys = np.where(mask[..., None], k, np.nan)
    actual = np.asarray(jitted(attend_with_lse, q, masked_keys, v, mask, scoring=Scoring(8**-0.5, softcap))[0])
    for i in range(3):
        expected = dense.attention(q[i][None], k[i][:, None], v[i][:, None], mask[i][None], softcap)[0][0]
        np.testing.assert_allclose(actual[i], expected, rtol=0, atol=tolerances.EXACT)
