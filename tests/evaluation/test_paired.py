"""The paired bootstrap, against scipy's and a case that can be counted."""

import tracemalloc

import numpy as np
import pytest

from icejax.evaluation.paired import DRAWS, SEED, difference


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


@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_resamples_in_blocks_are_those_of_a_single_draw(count):
    scores = np.random.default_rng(1).normal(size=count)
    chosen = np.random.default_rng(SEED).integers(count, size=(DRAWS, count))
    low, high = np.percentile(scores[chosen].mean(1), [2.5, 97.5])
    assert difference(scores, np.zeros(count)) == (scores.mean(), low, high)


def test_memory_is_that_of_a_block():
    tracemalloc.start()
    try:
        difference(np.arange(1000), np.zeros(1000))
        assert tracemalloc.get_traced_memory()[1] < 2**22  # all resamples would take 160 MB
    finally:
        tracemalloc.stop()
