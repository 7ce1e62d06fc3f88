"""k-means against plain numpy, and the cache's index of clusters of a long text."""

import functools

import numpy as np
import pytest

from icejax.cache.index import clusters
from icejax.ops.pages.kmeans import kmeans, nearest, sums
from tests import tolerances
from tests.helpers.run import jitted
from tests.reference import clusters as reference

COUNT, LENGTHS = 12, (200, 30, 5, 0)


def clouds(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors [4, 2, 200, 6] around nine centres, NaN where not valid, and the mask of valid vectors [4, 2, 200]."""
    rng = np.random.default_rng(seed)
    middles = 3 * rng.standard_normal((len(LENGTHS), 2, 9, 6))
    x = np.take_along_axis(middles, rng.integers(0, 9, (len(LENGTHS), 2, 200, 1)), axis=2)
    x = (x + rng.standard_normal(x.shape)).astype(np.float32)
    valid = np.arange(200) % 200 < np.asarray(LENGTHS)[:, None, None]
    valid = np.broadcast_to(valid, x.shape[:3]).copy()
    valid[1] = valid[1][:, ::-1]  # valid vectors need not come first
    x[~valid] = np.nan
    return x, valid


@pytest.mark.parametrize("cosine", [False, True])
def test_centroids_are_those_of_numpy(cosine):
    x, valid = clouds()
    centroids = np.asarray(jitted(kmeans, x, valid, count=COUNT, iterations=8, cosine=cosine))
    for row in np.ndindex(x.shape[:2]):
        vectors = x[row][valid[row]].astype(np.float64)
        expected = reference.kmeans(vectors, COUNT, 8, cosine=cosine)
        np.testing.assert_allclose(centroids[row], expected, rtol=0, atol=tolerances.EXACT)
        if len(vectors):
            codes = jitted(nearest, vectors.astype(np.float32), centroids[row], cosine=cosine)
            np.testing.assert_array_equal(codes, reference.nearest(vectors, expected, cosine=cosine))


def test_no_iteration_is_for_nothing():
    """Squared distances to the nearest centroid fall until they stay; a row with few vectors has each as a centroid."""
    x, valid = clouds()
    costs = []
    for iterations in range(9):
        centroids = np.asarray(jitted(kmeans, x, valid, count=COUNT, iterations=iterations))
        distance = np.square(x[..., None, :] - centroids[..., None, :, :]).sum(-1).min(-1)
        costs.append(np.where(valid, distance, 0).sum(-1))
    costs = np.stack(costs)  # iterations, 4, 2
    assert (np.diff(costs[:, :2], axis=0) <= 1e-3).all() and (costs[-1, 0] < 0.9 * costs[0, 0]).all()
    assert (np.diff(costs[:4, 0], axis=0) < 0).all()
    assert (costs[:, 2:] == 0).all()


@pytest.mark.parametrize("cosine", [False, True])
def test_of_some_centroids_there_are_few(cosine):
    """Each row has its own number of centroids, and no vector goes to a centroid beyond it."""
    x, valid = clouds(1)
    few = np.asarray([[12, 3], [5, 1], [4, 2], [1, 1]], np.int32)
    cluster = functools.partial(kmeans, count=COUNT, iterations=6, cosine=cosine)
    centroids = jitted(lambda x, valid, few: cluster(x, valid, few=few), x, valid, few)
    codes = jitted(lambda x, centroids, few: nearest(x, centroids, few=few, cosine=cosine), np.nan_to_num(x), centroids, few)
    for row in np.ndindex(few.shape):
        expected = reference.kmeans(x[row][valid[row]].astype(np.float64), few[row], 6, cosine=cosine)
        np.testing.assert_allclose(centroids[row][: few[row]], expected, rtol=0, atol=tolerances.EXACT)
        assert not np.asarray(centroids[row][few[row] :]).any() and np.asarray(codes)[row].max() < few[row]


def test_first_centroids_of_very_many_are_spread_over_all():
    """Beyond 46,341, whose square no longer fits a signed 32-bit integer."""
    count, number = 65_536, 131_071
    x = np.arange(number, dtype=np.float32)[:, None]
    centroids = np.asarray(jitted(kmeans, x, np.ones(number, bool), count=count, iterations=0))[:, 0]
    np.testing.assert_array_equal(centroids, np.arange(count, dtype=np.int64) * number // count)


def test_sums_are_of_the_vectors_of_each_code():
    x, valid = clouds()
    codes = np.random.default_rng(0).integers(0, COUNT, valid.shape).astype(np.int32)
    total, size = jitted(sums, np.where(valid[..., None], x, 0), codes, valid, count=COUNT)
    for row in np.ndindex(valid.shape[:2]):
        for i in range(COUNT):
            members = valid[row] & (codes[row] == i)
            assert size[row][i] == members.sum()
            np.testing.assert_allclose(total[row][i], x[row][members].sum(0, np.float64), rtol=0, atol=10 * tolerances.EXACT)


def test_a_long_text_is_clustered_in_stretches(monkeypatch):
    """A stretch's clusters have the numbers of its pages, and a cluster's size and means are those of its tokens."""
    monkeypatch.setattr(clusters, "STRETCH", 64)
    rng, pages, p = np.random.default_rng(0), 10, 16
    k, v = (rng.standard_normal((1, 2, pages, p, 8)).astype(np.float32) for _ in range(2))
    mask = np.broadcast_to((np.arange(pages * p) < 150).reshape(pages, p), k.shape[:4])
    described = jitted(clusters.ClustersIndex(p, 5).describe, k, v, mask)
    cluster_of_slot = np.asarray(jitted(lambda x: x.of_slots, described)).reshape(2, pages, p)
    assert (cluster_of_slot // 4 == np.arange(pages)[None, :, None] // 4)[:, mask[0, 0]].all()  # a stretch is four pages
    for head, cluster in np.ndindex(2, pages):
        members = mask[0, head] & (cluster_of_slot[head] == cluster)
        assert described.size[0, head, cluster] == members.sum()
        for mean, vectors in ((described.key, k), (described.value, v)):
            expected = vectors[0, head][members].mean(0) if members.any() else 0
            np.testing.assert_allclose(mean[0, head, cluster], expected, rtol=0, atol=tolerances.EXACT)
    assert (np.asarray(described.size).sum(-1) == 150).all()
