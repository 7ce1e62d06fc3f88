"""The value fit, a matrix that predicts values from keys: its accuracy, when it is zero, and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from icejax.cache.registry import Clustered
from icejax.cache.sizes import CacheSpec
from icejax.ops.pages.value_fit import RIDGE, empty_fit, page_sums, update_fit
from tests import tolerances
from tests.helpers.layer import KV_HEADS, SIZE, Layer, draw
from tests.reference.clustered import Fit

MIX = np.random.default_rng(5).standard_normal((SIZE, SIZE)).astype(np.float32) / SIZE**0.5


@jax.jit
def fit_of(*pages):
    shape = pages[0].shape[:2]
    return update_fit(empty_fit(*shape, SIZE, SIZE), jnp.zeros((*shape, SIZE, SIZE)), page_sums(*pages))


def pages_of(count: int, *, mixed: float, noise: float, rank: int = SIZE, seed: int = 0):
    """Returns keys, values and mask of pages of 16; values are keys times `mixed` MIX, plus a vector per page, plus noise."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((1, 1, count, 16, SIZE)).astype(np.float32)
    k[..., rank:] = 0
    page_centre = rng.standard_normal((1, 1, count, 1, SIZE)).astype(np.float32)
    v = mixed * k @ MIX + page_centre + noise * rng.standard_normal(k.shape).astype(np.float32)
    return k + 3 * page_centre, v, np.ones(k.shape[:4], bool)


def explained(matrix: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """Returns the share of the values' variance within pages that the matrix does not explain."""
    x, y = (a - a.mean(3, keepdims=True) for a in (k, v))
    return float(np.square(y - x @ np.asarray(matrix)[:, :, None]).sum() / np.square(y).sum())


def test_value_fit_is_found_behind_what_pages_share():
    fit = fit_of(*pages_of(200, mixed=1.0, noise=0.1))
    assert explained(fit.matrix, *pages_of(50, mixed=1.0, noise=0.1, seed=1)[:2]) < 0.05


def test_keys_that_lie_in_few_directions_tell_what_they_can():
    fit = fit_of(*pages_of(200, mixed=1.0, noise=0.1, rank=3))
    assert np.isfinite(fit.matrix).all() and np.abs(fit.matrix).max() < 2
    assert explained(fit.matrix, *pages_of(50, mixed=1.0, noise=0.1, rank=3, seed=1)[:2]) < 0.06  # noise is 0.053


@pytest.mark.parametrize("count", [1, 2, 4, 200])
def test_values_that_have_nothing_to_do_with_keys_stay_means(count):
    """Even with few tokens, which a matrix of least squares would fit exactly."""
    shares = [explained(fit_of(*pages_of(count, mixed=0.0, noise=1.0, seed=s)).matrix, *pages_of(100, mixed=0.0, noise=1.0)[:2])
            for s in range(1, 6)]  # fmt: skip
    assert np.mean(shares) < 1.03


def test_few_tokens_of_many_tell_little_and_it_is_known():
    """The fit is validated on odd and even pages in turn; with a single page the matrix is zero."""
    k, v, mask = pages_of(1, mixed=1.0, noise=0.0)
    assert not np.asarray(fit_of(k, v, mask).matrix).any()


@pytest.mark.parametrize("garbage", [np.inf, np.nan, 3e38], ids=str)
def test_a_row_of_garbage_leaves_no_matrix_and_others_theirs(garbage):
    k, v, mask = pages_of(20, mixed=1.0, noise=0.1)
    bad_keys = np.where(np.arange(20)[:, None, None] == 7, np.float32(garbage), k)
    fits = fit_of(*(np.concatenate(x) for x in ((k, bad_keys), (v, v), (mask, mask))))
    np.testing.assert_allclose(fits.matrix[0], fit_of(k, v, mask).matrix[0], rtol=0, atol=tolerances.EXACT)
    assert not np.asarray(fits.matrix[1]).any()


def test_slots_outside_the_mask_are_not_read():
    k, v, mask = pages_of(20, mixed=1.0, noise=0.1)
    mask = np.arange(16) < np.arange(20)[:, None] % 17
    expected = Fit(SIZE, SIZE)
    expected.add(
        *(x.reshape(-1, SIZE).astype(np.float64) for x in (k, v)), [16 * i + np.flatnonzero(mask[i]) for i in range(20)]
    )
    fit = fit_of(np.where(mask[..., None], k, np.nan), np.where(mask[..., None], v, np.inf), mask[None, None])
    np.testing.assert_allclose(fit.matrix[0, 0], expected.matrix, rtol=0, atol=tolerances.EXACT)


def test_texts_add_up():
    """A fit updated with a second text is that of both texts, scaled by how well parts of the texts predict one another."""
    first, second = pages_of(30, mixed=1.0, noise=0.3), pages_of(8, mixed=1.0, noise=0.3, seed=1)

    @jax.jit
    def fit_both(first, second):
        first_sums = page_sums(*first)
        fit = update_fit(empty_fit(1, 1, SIZE, SIZE), jnp.zeros((1, 1, SIZE, SIZE)), first_sums)
        return update_fit(fit, first_sums.keys.sum(2), page_sums(*second))

    fit_of_both = fit_both(first, second)
    expected = Fit(SIZE, SIZE)
    for k, v, _ in (first, second):
        expected.add(
            *(x.reshape(-1, SIZE).astype(np.float64) for x in (k, v)), list(np.arange(k.shape[2] * 16).reshape(-1, 16))
        )
    np.testing.assert_allclose(fit_of_both.matrix[0, 0], expected.matrix, rtol=0, atol=tolerances.EXACT)
    x, y = (np.concatenate([(a - a.mean(3, keepdims=True)).reshape(-1, SIZE) for a in pair])
            for pair in zip(first[:2], second[:2], strict=True))  # fmt: skip
    gram = x.T @ x
    least_squares = np.linalg.solve(gram + RIDGE * np.trace(gram) / SIZE * np.eye(SIZE), x.T @ y)
    np.testing.assert_allclose(
        fit_of_both.matrix[0, 0],
        least_squares * (fit_of_both.matrix[0, 0] * least_squares).sum() / np.square(least_squares).sum(),
        atol=1e-4,
    )


@pytest.mark.parametrize("size, dtype, pages, there", [(64, "float32", 124, True), (64, "float32", 123, False),
                                                       (128, "bfloat16", 495, True), (128, "bfloat16", 494, False)])  # fmt: skip
def test_no_matrix_above_a_quarter_of_the_digests_bytes(size, dtype, pages, there):
    spec = CacheSpec(batch_size=1, num_heads=2, num_kv_heads=2, head_dim=size, value_dim=size, prompt_capacity=16 * pages,
                     new_capacity=0, dtype=dtype)  # fmt: skip
    index = jax.eval_shape(lambda: Clustered().index.empty(spec, pages))
    assert (index.fit is not None) == there


@pytest.mark.slow
def test_answers_without_it_are_worse():
    """Where values depend on keys, the fit brings a small budget nearer to exact attention."""
    prompt, new = ((q, k, v + 3 * k @ MIX) for q, k, v in draw((256, 200), 8))
    dense = Layer(Clustered(budget=1024), (256, 200), *prompt)
    with_fit, without_fit = (
        Layer(Clustered(budget=48, candidates=1, value_fit=on), (256, 200), *prompt) for on in (True, False)
    )
    errors = np.zeros(2)
    for step in range(8):
        q, k, v = (x[step] for x in new)
        exact = dense.step(q, k, v)
        errors += [np.linalg.norm(layer.step(q, k, v) - exact) for layer in (with_fit, without_fit)]
    assert errors[0] < 0.8 * errors[1]
    assert dense.spec.num_kv_heads == KV_HEADS
