"""Key codes, and the coded policy, which ranks tokens by them, against plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.options import make_policy
from icejax.cache.registry import Coded
from icejax.cache.sizes import CacheSpec
from icejax.checks.errors import InputError
from icejax.ops.pages import key_codes
from tests import tolerances
from tests.cache.test_clustered import STEPS, assert_reference
from tests.helpers import layer as harness
from tests.helpers.run import jitted
from tests.reference import coded as reference_coded


@pytest.mark.parametrize("bits", [*(pytest.param(bits, marks=pytest.mark.slow) for bits in (1, 2)), 4])
def test_codes_stand_for_the_line_nearest_to_the_keys(bits):
    """With a number of channels that fills no whole byte, partial and empty pages, and NaN in empty slots."""
    rng = np.random.default_rng(bits)
    k, mask = rng.standard_normal((2, 3, 200, 8, 21)).astype(np.float32), np.arange(8) < rng.integers(0, 9, (2, 3, 200, 1))
    k[0, 0, 0, :, 0] = 3.0  # a constant channel
    codes = jitted(key_codes.encode_keys, np.where(mask[..., None], k, np.nan), mask, bits=bits, scales="float32")
    assert (codes.codes.shape, codes.codes.dtype) == ((2, 3, 200, 8 * -(-21 * bits // 8)), "uint8")
    assert codes.low.shape == codes.step.shape == (2, 3, 200, 21)
    keys = np.asarray(jitted(key_codes.decode_keys, codes, page_size=8, bits=bits, dtype="float32"))
    lows, steps = np.asarray(codes.low), np.asarray(codes.step)
    for page in np.ndindex(2, 3, 200):
        if len(expected := k[page][mask[page]]):
            low, step = reference_coded.line(expected, bits)
            for actual, y in ((lows[page], low), (steps[page], step)):
                np.testing.assert_allclose(actual, y, rtol=0, atol=tolerances.EXACT, err_msg=str(page))
            apart, nearest = np.abs(keys[page][mask[page]] - expected), reference_coded.distance(expected, low, step, bits)
            np.testing.assert_allclose(apart, nearest, rtol=0, atol=tolerances.EXACT, err_msg=str(page))
        else:
            assert not keys[page].any()


@pytest.mark.slow
def test_codes_go_where_their_pages_go():
    rng, size = np.random.default_rng(0), (1, 2, 6, 8, 16)
    spec = CacheSpec(
        batch_size=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        value_dim=16,
        prompt_capacity=32,
        new_capacity=16,
        dtype="float32",
    )
    tree = Coded(page_size=8).index
    k, v = (jnp.asarray(rng.standard_normal(size), jnp.float32) for _ in range(2))
    index = tree.with_pages(tree.empty(spec, 6), tree.describe(k, v, jnp.ones(size[:-1], bool)), jnp.int32(0))
    moved = tree.after_move(index, jnp.array([5, 4]), jnp.array([True, False]), jnp.int32(2), behind=4)
    for vectors in ("keys", "values"):
        before, after = (np.asarray(key_codes.decode_keys(getattr(x.codes, vectors), 8, 4, "float32")) for x in (index, moved))
        np.testing.assert_array_equal(after[:, :, :3], before[:, :, [0, 1, 5]])
        assert before.any((0, 1, 3, 4)).all() and not after[:, :, 3:].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "singly", "atol"),
    [(4, True, tolerances.CODES), (3, False, tolerances.EXACT), (2, True, tolerances.EXACT), (1, False, tolerances.EXACT)],
    ids=["4-tokens", "3-pages", "2-tokens", "1-pages"],
)
def test_200_steps_equal_the_reference(monkeypatch, codes, singly, atol):
    """One level of nodes above the pages, twelve flushes and three compactions; long and short prompts."""
    monkeypatch.setattr(harness, "PROMPT", 1024)
    policy = Coded(budget=64, candidates=2, opened=4, codes=codes, singly=singly, compact_every=64)
    reference = reference_coded.Tokens if singly else reference_coded.Pages
    assert_reference(monkeypatch, policy, (1000, 150, 20), STEPS, levels=2, reference=reference, atol=atol)


@pytest.mark.slow
def test_rows_that_join_late_equal_the_reference(monkeypatch):
    policy = Coded(budget=48, page_size=8, candidates=1, opened=4, codes=3, compact_every=32)
    reference = reference_coded.Tokens
    assert_reference(monkeypatch, policy, (250, 21, 7), 70, levels=2, clock=7, reference=reference, atol=tolerances.CODES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(codes=5), "codes must be one of 1, 2, 3, 4, 8, got 5"),
        (dict(tail=False), "cache 'coded' has no option 'tail': expected one of budget, "),
        (dict(rerank=False), "cache 'coded' has no option 'rerank': expected one of budget, "),
        (dict(reuse=3), "cache 'coded' has no option 'reuse': expected one of budget, "),
    ],
)
def test_what_leaves_nothing_to_rank_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_policy("coded", options)
