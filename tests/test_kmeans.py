"""k-means against plain numpy, and what the cache keeps of it."""

import numpy as np
import pytest

from icejax.ops.kmeans import kmeans, nearest
from tests import reference_retrieval as reference
from tests import tolerances
from tests.run import jitted

COUNT, LENGTHS = 12, (200, 30, 5, 0)


def clouds(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors [4, 2, 200, 6] around a few middles, and which there are; the others are NaN."""
    rng = np.random.default_rng(seed)
    middles = 3 * rng.standard_normal((len(LENGTHS), 2, 9, 6))
    x = np.take_along_axis(middles, rng.integers(0, 9, (len(LENGTHS), 2, 200, 1)), axis=2)
    x = (x + rng.standard_normal(x.shape)).astype(np.float32)
    there = np.arange(200) % 200 < np.asarray(LENGTHS)[:, None, None]
    there = np.broadcast_to(there, x.shape[:3]).copy()
    there[1] = there[1][:, ::-1]  # not only in front
    x[~there] = np.nan
    return x, there


@pytest.mark.parametrize("cosine", [False, True])
def test_centroids_are_those_of_numpy(cosine):
    x, there = clouds()
    found = np.asarray(jitted(kmeans, x, there, count=COUNT, iterations=8, cosine=cosine))
    for row in np.ndindex(x.shape[:2]):
        own = x[row][there[row]].astype(np.float64)
        expected = reference.kmeans(own, COUNT, 8, cosine=cosine)
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=tolerances.EXACT)
        if len(own):
            codes = jitted(nearest, own.astype(np.float32), found[row], cosine=cosine)
            np.testing.assert_array_equal(codes, reference.nearest(own, expected, cosine=cosine))


def test_no_iteration_is_for_nothing():
    """The mean square distance to the nearest centroid falls until it stays; few vectors are their own centroids."""
    x, there = clouds()
    costs = []
    for iterations in range(9):
        centroids = np.asarray(jitted(kmeans, x, there, count=COUNT, iterations=iterations))
        distance = np.square(x[..., None, :] - centroids[..., None, :, :]).sum(-1).min(-1)
        costs.append(np.where(there, distance, 0).sum(-1))
    costs = np.stack(costs)  # iterations, 4, 2
    assert (np.diff(costs[:, :2], axis=0) <= 1e-3).all() and (costs[-1, 0] < 0.9 * costs[0, 0]).all()
    assert (np.diff(costs[:4, 0], axis=0) < 0).all()
    assert (costs[:, 2:] == 0).all()
