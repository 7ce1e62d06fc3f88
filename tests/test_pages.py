"""Page formation and digests: properties, and float64 references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icejax.ops import pages
from icejax.ops.digests import VARIANCE_CLAMP, digest, score
from tests import tolerances

packed = jax.jit(pages.pack, static_argnames=("page_size", "span"))


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.sampled_from([256, 384]),
    counts=st.tuples(st.integers(0, 256), st.integers(0, 256)),
    page_size=st.sampled_from([4, 16]),
    block=st.sampled_from([64, 1024]),
    span=st.sampled_from([128, 8192]),
    seed=st.integers(0, 99),
)
def test_every_token_is_in_one_slot_and_empty_slots_come_last_in_a_span(tokens, counts, page_size, block, span, seed):
    keys = np.random.default_rng(seed).standard_normal((2, 3, tokens, 8)).astype(np.float32)
    valid = np.arange(tokens)[None, :] < np.asarray(counts)[:, None]
    keys[~np.broadcast_to(valid[:, None, :], (2, 3, tokens))] = np.nan
    pages.BLOCK, kept = block, pages.BLOCK
    try:
        order = np.asarray(pages.pack(jnp.asarray(keys), jnp.asarray(valid), page_size=page_size, span=span))
    finally:
        pages.BLOCK = kept
    np.testing.assert_array_equal(np.sort(order, axis=-1), np.broadcast_to(np.arange(tokens), order.shape))
    spans = -(-tokens // span)
    for row in range(2):
        for head in range(3):
            for part, found in enumerate(order[row, head].reshape(spans, -1)):
                start = part * tokens // spans
                assert ((found >= start) & (found < start + tokens // spans)).all()
                filled = valid[row, found]
                assert (np.sort(~filled) == ~filled).all()


def test_pages_hold_tokens_alike():
    """Tokens of 64 tight clusters of 16, shuffled, come back one cluster to a page."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(64), 16))
    keys = (
        rng.standard_normal((64, 32)).astype(np.float32)[labels] * 5 + rng.standard_normal((1024, 32)).astype(np.float32) * 0.1
    )
    order = np.asarray(packed(keys[None, None], np.ones((1, 1024), bool), page_size=16, span=8192))[0, 0]
    assert all(len(set(page)) == 1 for page in labels[order].reshape(64, 16))


def test_packing_beats_order_of_time_on_spread():
    """Over four blocks of a span, packed pages are tighter than pages of neighbours in time."""
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((40, 16)).astype(np.float32)[rng.integers(0, 40, 4096)] + 0.3 * rng.standard_normal((4096, 16))
    keys = keys.astype(np.float32)
    order = np.asarray(packed(keys[None, None], np.ones((1, 4096), bool), page_size=16, span=8192))[0, 0]
    spread = [np.asarray(keys[o]).reshape(256, 16, 16).var(axis=1).sum(-1).mean() for o in (order, np.arange(4096))]
    assert spread[0] < 0.3 * spread[1]


@pytest.mark.parametrize("size", [1, 16])
def test_digest_equals_float64(size):
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((2, 3, 5, 16, size)) * 3 + 10
    counts = rng.integers(0, 17, (2, 3, 5))
    counts[0, 0] = (0, 1, 16, 2, 7)
    mask = np.arange(16) < counts[..., None]
    keys[~mask] = np.nan
    found = digest(jnp.asarray(keys, jnp.float32), jnp.asarray(mask))
    np.testing.assert_array_equal(found.count, counts)
    for at in np.ndindex(2, 3, 5):
        kept = keys[at][mask[at]].astype(np.float32).astype(np.float64)
        mean, variance = (kept.mean(0), kept.var(0)) if len(kept) else (np.zeros(size), np.zeros(size))
        np.testing.assert_allclose(found.mean[at], mean, rtol=tolerances.DIGEST, atol=tolerances.DIGEST)
        np.testing.assert_allclose(found.variance[at], variance, rtol=1e-4, atol=tolerances.DIGEST)


def test_score_is_the_second_order_estimate_and_close_to_log_sum_exp():
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((1, 1, 30, 1, 64))
    keys = (centres + 0.3 * rng.standard_normal((1, 1, 30, 16, 64))).astype(np.float32)
    q = rng.standard_normal((1, 1, 2, 64)).astype(np.float32) * 2
    counts = np.full((1, 1, 30), 16)
    counts[..., 3], counts[..., 7] = 0, 5
    mask = np.arange(16) < counts[..., None]
    found = np.asarray(score(jnp.asarray(q), digest(jnp.asarray(keys), jnp.asarray(mask))))
    for page in range(30):
        kept = keys[0, 0, page][mask[0, 0, page]].astype(np.float64)
        for head in range(2):
            if not len(kept):
                assert found[0, 0, head, page] == -np.inf
                continue
            scaled = q[0, 0, head].astype(np.float64) / 8
            second = min(0.5 * (scaled**2 @ kept.var(0)), VARIANCE_CLAMP)
            expected = np.log(len(kept)) + scaled @ kept.mean(0) + second
            assert found[0, 0, head, page] == pytest.approx(expected, abs=1e-4)
            assert found[0, 0, head, page] == pytest.approx(np.log(np.exp(kept @ scaled).sum()), abs=0.5)


def test_score_clamps_wide_pages():
    keys = np.random.default_rng(4).standard_normal((1, 1, 1, 16, 8)).astype(np.float32) * 100
    digests = digest(jnp.asarray(keys), jnp.ones((1, 1, 1, 16), bool))
    q = np.full((1, 1, 1, 8), 3.0, np.float32)
    found = float(score(jnp.asarray(q), digests)[0, 0, 0, 0])
    expected = np.log(16) + 3.0 / 8**0.5 * keys[0, 0, 0].astype(np.float64).mean(0).sum() + VARIANCE_CLAMP
    assert found == pytest.approx(expected, rel=1e-4)
