"""The paired bootstrap, against scipy's and a case that can be counted."""

import numpy as np
import pytest

from icejax.evaluation.paired import difference


def test_the_interval_is_that_of_the_differences():
    rng = np.random.default_rng(1)
    scores = rng.integers(2, size=200)
    others = np.where(rng.random(200) < 0.1, 1 - scores, scores)
    mean, low, high = difference(scores, others)
    assert mean == pytest.approx((scores - others).mean())
    # The bootstrap's interval of a mean of 200 is close to the normal one, and pairs make it narrower than two samples would.
    half = 1.96 * (scores - others).std() / np.sqrt(200)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.006)
    assert difference(scores, scores) == (0, 0, 0)
