"""k-means against plain numpy, and what the cache keeps of it."""

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


@pytest.mark.parametrize("cosine", [False, True])
def test_of_some_centroids_there_are_few(cosine):
    """No vector goes to the others, where the number differs from row to row."""
    x, there = clouds(1)
    few = np.asarray([[12, 3], [5, 1], [4, 2], [1, 1]], np.int32)
    made = functools.partial(kmeans, count=COUNT, iterations=6, cosine=cosine)
    found = jitted(lambda x, there, few: made(x, there, few=few), x, there, few)
    codes = jitted(lambda x, found, few: nearest(x, found, few=few, cosine=cosine), np.nan_to_num(x), found, few)
    for row in np.ndindex(few.shape):
        expected = reference.kmeans(x[row][there[row]].astype(np.float64), few[row], 6, cosine=cosine)
        np.testing.assert_allclose(found[row][: few[row]], expected, rtol=0, atol=tolerances.EXACT)
        assert not np.asarray(found[row][few[row] :]).any() and np.asarray(codes)[row].max() < few[row]


def test_first_centroids_of_very_many_are_spread_over_all():
    """More than 46,341, whose square is beyond 32 bits with a sign."""
    count, number = 65_536, 131_071
    x = np.arange(number, dtype=np.float32)[:, None]
    found = np.asarray(jitted(kmeans, x, np.ones(number, bool), count=count, iterations=0))[:, 0]
    np.testing.assert_array_equal(found, np.arange(count, dtype=np.int64) * number // count)


def test_sums_are_of_the_vectors_of_each_code():
    x, there = clouds()
    codes = np.random.default_rng(0).integers(0, COUNT, there.shape).astype(np.int32)
    total, size = jitted(sums, np.where(there[..., None], x, 0), codes, there, count=COUNT)
    for row in np.ndindex(there.shape[:2]):
        for i in range(COUNT):
            own = there[row] & (codes[row] == i)
            assert size[row][i] == own.sum()
            np.testing.assert_allclose(total[row][i], x[row][own].sum(0, np.float64), rtol=0, atol=10 * tolerances.EXACT)


def test_a_long_text_is_clustered_in_stretches(monkeypatch):
    """Clusters stand in the places of the pages of their stretch, and their means are of the tokens that say so."""
    monkeypatch.setattr(clusters, "STRETCH", 64)
    rng, pages, p = np.random.default_rng(0), 10, 16
    k, v = (rng.standard_normal((1, 2, pages, p, 8)).astype(np.float32) for _ in range(2))
    mask = np.broadcast_to((np.arange(pages * p) < 150).reshape(pages, p), k.shape[:4])
    found = jitted(clusters.ClustersIndex(p, 5).describe, k, v, mask)
    of = np.asarray(jitted(lambda x: x.of_slots, found)).reshape(2, pages, p)
    assert (of // 4 == np.arange(pages)[None, :, None] // 4)[:, mask[0, 0]].all()  # four pages are a stretch
    for head, cluster in np.ndindex(2, pages):
        own = mask[0, head] & (of[head] == cluster)
        assert found.size[0, head, cluster] == own.sum()
        for mean, of_all in ((found.key, k), (found.value, v)):
            expected = of_all[0, head][own].mean(0) if own.any() else 0
            np.testing.assert_allclose(mean[0, head, cluster], expected, rtol=0, atol=tolerances.EXACT)
    assert (np.asarray(found.size).sum(-1) == 150).all()
