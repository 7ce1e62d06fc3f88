"""Page digests, their merging into nodes, and page scores, against float64 references."""

import numpy as np
import pytest

from icejax.ops.attention.dense import Scoring
from icejax.ops.pages.digests import OUTLIERS, TAIL_CLAMP, digest, score
from icejax.ops.pages.key_scatter import along
from tests.helpers.dense import capped
from tests.helpers.paged import check, float64, nodes_of, pages_of, read, scatter_of
from tests.helpers.run import jitted
from tests.reference.clustered import bands


@pytest.mark.parametrize("size", [1, 16])
def test_digest_equals_float64(size):
    rng = np.random.default_rng(2)
    keys, values, mask = pages_of(rng, 20, size, heads=3)
    keys[~mask], values[~mask] = np.nan, np.nan
    digests = read(jitted(digest, keys, values, mask))
    for index in np.ndindex(1, 3, 20):
        check(digests, index, float64(keys[index], values[index], mask[index]))


def test_merging_is_exact():
    keys, values, mask = pages_of(np.random.default_rng(3), 48)
    mask[:, :, :16] = False  # a node whose 16 pages are all empty
    pages = jitted(digest, keys, values, mask)
    nodes = read(jitted(nodes_of, pages))
    for node in range(3):
        children = np.s_[0, 0, 16 * node : 16 * node + 16]
        check(nodes, (0, 0, node), float64(keys[children], values[children], mask[children]))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_score_is_second_order_and_close_to_log_sum_exp(softcap):
    scoring = Scoring(64**-0.5, softcap)
    rng = np.random.default_rng(5)
    keys, values, mask = pages_of(rng, 30, 64, spread=0.3)
    q = rng.standard_normal((1, 1, 2, 64)).astype(np.float32) * 2
    scatter = scatter_of(keys, mask)
    variances = np.diag(scatter[0, 0])
    covariance = jitted(along, q, scatter.astype(np.float32), scoring=scoring)
    selection_scores, tail_scores, *_ = map(
        np.asarray, jitted(score, q, jitted(digest, keys, values, mask), covariance, scoring=scoring)
    )
    for page in range(30):
        page_keys = keys[0, 0, page][mask[0, 0, page]].astype(np.float64)
        for head in range(2):
            if not len(page_keys):
                assert tail_scores[0, 0, head, page] == -np.inf
                continue
            scaled = q[0, 0, head].astype(np.float64) / 8
            _, *outliers, mean, width, _ = float64(keys[0, 0, page], values[0, 0, page], mask[0, 0, page])
            first_order, outlier_score = (
                np.log(len(page_keys)) + capped(scaled @ mean, softcap),
                capped(max(scaled @ x for x in outliers), softcap),
            )
            slope = (capped(scaled @ mean + 1e-5, softcap) - capped(scaled @ mean - 1e-5, softcap)) / 2e-5
            second_order = 0.5 * slope**2 * ((bands(64) @ (scaled**2 * variances)) / (bands(64) @ variances) @ width)
            assert selection_scores[0, 0, head, page] == pytest.approx(max(first_order + second_order, outlier_score), abs=1e-4)
            assert tail_scores[0, 0, head, page] == pytest.approx(
                max(first_order + min(second_order, TAIL_CLAMP), outlier_score), abs=1e-4
            )
            if len(page_keys) > 2 * OUTLIERS:  # on smaller pages the two outliers differ too much from the mean of the others
                exact = np.log(np.exp(capped(page_keys @ scaled, softcap)).sum())
                assert tail_scores[0, 0, head, page] == pytest.approx(exact, abs=0.5)


@pytest.mark.parametrize("dtype, step", [("int8", 1 / 127), ("float8_e4m3fn", 1 / 8)])
def test_narrow_digests_are_within_a_step_and_merge(dtype, step):
    """The error is at most half a step: of the vector's largest value in int8, of the value itself in fp8 (3 mantissa bits)."""
    keys, values, mask = pages_of(np.random.default_rng(10), 48)
    wide, narrow = (jitted(digest, keys, values, mask, dtype=dtype) for dtype in (None, dtype))
    nodes = [jitted(nodes_of, x) for x in (wide, narrow)]
    # Outliers of nodes are not compared: rounding may change which of its pages' outliers a node keeps.
    for exact, rounded, outliers, max_steps in ((wide, narrow, OUTLIERS, 0.51), (*nodes, 0, 2.0)):
        np.testing.assert_array_equal(rounded.count, exact.count)
        vectors = ((*level.outliers[:outliers], level.mean, level.value) for level in (exact, rounded))
        for exact_vector, rounded_vector in zip(*vectors, strict=True):
            x, y = np.asarray(exact_vector.read()), np.asarray(rounded_vector.read())
            assert (np.abs(x - y) <= max_steps * step * np.abs(x).max(-1, keepdims=True)).all()
            assert np.asarray(rounded_vector.data).dtype == dtype
