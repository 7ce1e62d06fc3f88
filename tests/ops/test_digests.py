"""Digests and scores against float64 references."""

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
    found = read(jitted(digest, keys, values, mask))
    for at in np.ndindex(1, 3, 20):
        check(found, at, float64(keys[at], values[at], mask[at]))


def test_merging_is_exact():
    keys, values, mask = pages_of(np.random.default_rng(3), 48)
    mask[:, :, :16] = False  # a whole family of empty pages
    pages = jitted(digest, keys, values, mask)
    found = read(jitted(nodes_of, pages))
    for node in range(3):
        part = np.s_[0, 0, 16 * node : 16 * node + 16]
        check(found, (0, 0, node), float64(keys[part], values[part], mask[part]))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_score_is_second_order_and_close_to_log_sum_exp(softcap):
    scoring = Scoring(64**-0.5, softcap)
    rng = np.random.default_rng(5)
    keys, values, mask = pages_of(rng, 30, 64, spread=0.3)
    q = rng.standard_normal((1, 1, 2, 64)).astype(np.float32) * 2
    scatter = scatter_of(keys, mask)
    own = np.diag(scatter[0, 0])
    lies = jitted(along, q, scatter.astype(np.float32), scoring=scoring)
    chosen_by, found, *_ = map(np.asarray, jitted(score, q, jitted(digest, keys, values, mask), lies, scoring=scoring))
    for page in range(30):
        kept = keys[0, 0, page][mask[0, 0, page]].astype(np.float64)
        for head in range(2):
            if not len(kept):
                assert found[0, 0, head, page] == -np.inf
                continue
            scaled = q[0, 0, head].astype(np.float64) / 8
            _, *outliers, mean, width, _ = float64(keys[0, 0, page], values[0, 0, page], mask[0, 0, page])
            first, alone = (
                np.log(len(kept)) + capped(scaled @ mean, softcap),
                capped(max(scaled @ x for x in outliers), softcap),
            )
            slope = (capped(scaled @ mean + 1e-5, softcap) - capped(scaled @ mean - 1e-5, softcap)) / 2e-5
            second = 0.5 * slope**2 * ((bands(64) @ (scaled**2 * own)) / (bands(64) @ own) @ width)
            assert chosen_by[0, 0, head, page] == pytest.approx(max(first + second, alone), abs=1e-4)
            assert found[0, 0, head, page] == pytest.approx(max(first + min(second, TAIL_CLAMP), alone), abs=1e-4)
            if len(kept) > 2 * OUTLIERS:  # of fewer, two are not like the others that stand for all
                whole = np.log(np.exp(capped(kept @ scaled, softcap)).sum())
                assert found[0, 0, head, page] == pytest.approx(whole, abs=0.5)


@pytest.mark.parametrize("dtype, step", [("int8", 1 / 127), ("float8_e4m3fn", 1 / 8)])
def test_narrow_digests_are_within_a_step_and_merge(dtype, step):
    """A value is off by half a step: of its vector's largest (int8), of itself (fp8, three bits of mantissa)."""
    keys, values, mask = pages_of(np.random.default_rng(10), 48)
    wide, narrow = (jitted(digest, keys, values, mask, dtype=dtype) for dtype in (None, dtype))
    families = [jitted(nodes_of, x) for x in (wide, narrow)]
    # Which outliers of its pages a node keeps may hang on their rounding.
    for exact, found, outliers, steps in ((wide, narrow, OUTLIERS, 0.51), (*families, 0, 2.0)):
        np.testing.assert_array_equal(found.count, exact.count)
        vectors = ((*each.outliers[:outliers], each.mean, each.value) for each in (exact, found))
        for own, other in zip(*vectors, strict=True):
            x, y = np.asarray(own.read()), np.asarray(other.read())
            assert (np.abs(x - y) <= steps * step * np.abs(x).max(-1, keepdims=True)).all()
            assert np.asarray(other.data).dtype == dtype
