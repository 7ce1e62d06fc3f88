"""The attention that each key receives, summed over queries, against sums of a float64 softmax over explicit masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icejax.ops.attention import key_attention_sums as module
from icejax.ops.attention.causal import causal
from icejax.ops.attention.dense import EINSUM, Scoring
from icejax.ops.attention.key_attention_sums import key_attention_sums
from icejax.ops.attention.recent_attention import recent_attention_sums
from tests import tolerances
from tests.helpers import dense
from tests.helpers.run import jitted

SIZE = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)


def draw(lengths, tokens, *, heads=4, kv_heads=2, window=None, scale=1.0, softcap=None, seed=0):
    """Returns q [B, T, N, H], k [B, T, K, H], log-sum-exp [B, T, N], with NaN in padding, and each row's weights [N, T, T]."""
    rng = np.random.default_rng(seed)
    shapes = (heads, SIZE), (kv_heads, SIZE), (heads,)
    q, k, lse = (rng.standard_normal((len(lengths), tokens, *shape)).astype(np.float32) for shape in shapes)
    q, weights = q * np.float32(scale), []
    for i, length in enumerate(lengths):
        attention, lse[i, :length] = dense.weights(q[i, :length], k[i, :length], dense.causal(length, window), softcap)
        weights.append(attention)
        for x in (q, k, lse):
            x[i, length:] = np.nan
    return q, k, lse, weights


def sums_of(q, k, lse, lengths, window=None, softcap=None):
    options = dict(lengths=jnp.asarray(lengths, jnp.int32), window=window, scoring=Scoring(q.shape[-1] ** -0.5, softcap))
    return np.asarray(jitted(lambda *arrays: key_attention_sums(*arrays, **options), q, k, lse))


WINDOWS, FORMS = (None, 1, 16, 50), ((2, 3, 2.0), (1, 3, None), (2, 0.3, None), (4, 1, None))


@pytest.mark.parametrize(
    ("kv_heads", "scale", "softcap", "window"),
    [
        pytest.param(*FORMS[i], WINDOWS[j], marks=() if i == j else pytest.mark.slow)
        for i in range(len(FORMS))
        for j in range(len(WINDOWS))
    ],
)
def test_sums_equal_float64(kv_heads, scale, softcap, window):
    lengths, tokens = (96, 3, 61), 112
    *arrays, weights = draw(lengths, tokens, kv_heads=kv_heads, window=window, scale=scale, softcap=softcap)
    sums = sums_of(*arrays, lengths, window, softcap)
    for i, length in enumerate(lengths):
        expected = weights[i].sum(1)
        np.testing.assert_allclose(sums[i, :, :length], expected, rtol=tolerances.EXACT, atol=tolerances.EXACT)
        np.testing.assert_array_equal(sums[i, :, length:], 0)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sums_over_the_last_queries_equal_float64(softcap):
    length, last = 90, 20
    q, k, lse, (weights,) = draw((length,), length, scale=3, softcap=softcap)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (1, 2, length))
    asking, scoring = positions[:, 0, -last:], Scoring(SIZE**-0.5, softcap)
    sums = jitted(
        lambda q, lse, k: recent_attention_sums(q, lse, k, asking=asking, positions=positions, scoring=scoring),
        q[:, -last:],
        lse[:, -last:],
        k.swapaxes(1, 2),
    )
    expected = weights[:, -last:].sum(1).reshape(sums.shape)
    np.testing.assert_allclose(sums, expected, rtol=tolerances.EXACT, atol=tolerances.EXACT)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    window=st.sampled_from([None, 1, 7, 30]),
    seed=st.integers(0, 9),
)
def test_every_query_gives_one(lengths, window, seed):
    """Given the log-sum-exp that `causal` returns, a row's sums over all keys add up to its number of queries."""
    q, k, *_ = draw(lengths, 48, seed=seed)
    scoring = Scoring(SIZE**-0.5)
    lse = jitted(lambda q, k: causal(q, k, k, lengths=jnp.asarray(lengths), window=window, scoring=scoring).lse, q, k)
    sums = sums_of(q, k, lse, lengths, window).sum(-1)
    expected = np.broadcast_to(np.asarray(lengths)[:, None], sums.shape)
    np.testing.assert_allclose(sums, expected, rtol=tolerances.EXACT)


@pytest.mark.parametrize(("window", "blocks"), [(None, 21), (17, 11)])
def test_no_block_runs_in_vain(monkeypatch, window, blocks):
    """Of 6 x 6 blocks of queries and keys, only those run whose keys are neither after the queries nor before their window."""
    runs = []

    def counted(*operands):
        jax.debug.callback(lambda: runs.append(None))
        return EINSUM(*operands)

    monkeypatch.setattr(module, "EINSUM", counted)
    *arrays, _ = draw((96, 91), 112, window=window)
    sums_of(*arrays, (96, 91), window)
    jax.effects_barrier()
    assert len(runs) == blocks
