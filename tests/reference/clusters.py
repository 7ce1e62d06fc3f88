"""k-means, and the retrieval methods that use it, in plain float64 numpy, one row, for the tests in tests/cache and tests/ops.

Methods, shapes and positions are those of `tests.reference.retrieval`.
"""

from __future__ import annotations

import numpy as np

from tests.reference.peers import best, softmax
from tests.reference.retrieval import Paged


def kmeans(x: np.ndarray, count: int, iterations: int, *, cosine: bool = False) -> np.ndarray:
    """Returns the centroids [count, d] of x [n, d] after Lloyd's iterations, which begin at evenly spaced vectors."""
    if not len(x):
        return np.zeros((count, x.shape[1]))
    centroids = np.stack([x[i * len(x) // count] for i in range(count)])
    for _ in range(iterations):
        codes = nearest(x, centroids, cosine=cosine)
        centroids = np.stack([x[codes == i].mean(0) if (codes == i).any() else old for i, old in enumerate(centroids)])
    return centroids


def nearest(x: np.ndarray, centroids: np.ndarray, *, cosine: bool = False) -> np.ndarray:
    """Returns the index [n] of the centroid [count, d] nearest to each vector of x [n, d], by angle or by distance."""
    if cosine:
        x, centroids = (y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-30) for y in (x, centroids))
    return np.square(x[:, None] - centroids[None]).sum(-1).argmin(1)


class Coded(Paged):
    """Base class: every token in pages has a code for each part of its key, the nearest of that part's centroids.

    The centroids are computed once, from the first tokens that are in pages.
    """

    def __init__(self, parts: int, centroids: int, iterations: int, *, cosine: bool = False, **options) -> None:
        super().__init__(16, **options)
        self.parts, self.kmeans_options, self.cosine, self.centroids = parts, (centroids, iterations), cosine, None
        self._set_centroids()

    def _set_centroids(self) -> None:
        """Computes the centroids [count, H / parts] of each KV head and part, once there are tokens in pages."""
        if self.centroids is None and self.paged():
            self.centroids = [
                [kmeans(x, *self.kmeans_options, cosine=self.cosine) for x in head_keys] for head_keys in self.keys()
            ]

    def keys(self) -> list[list[np.ndarray]]:
        """Returns for each KV head and part the keys [n, H / parts] of the tokens in pages."""
        return [np.split(x, self.parts, axis=1) for x in self.tokens.k[self.paged()].swapaxes(0, 1)]

    def end_step(self) -> None:
        super().end_step()
        self._set_centroids()

    def codes(self) -> list[list[np.ndarray]]:
        """Returns for each KV head and part the codes [n] of the tokens in pages."""
        pairs = (zip(*head, strict=True) for head in zip(self.keys(), self.centroids, strict=True))
        return [[nearest(x, centroids, cosine=self.cosine) for x, centroids in parts] for parts in pairs]

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions of the tokens in pages that each query head attends to, sorted."""
        raise NotImplementedError

    def selected(self, q: np.ndarray) -> list[list[int]]:
        return [[*self.near(), *positions] for positions in (self.chosen(q) if self.paged() else [[]] * len(q))]


class PQCache(Coded):
    """PQCache: the tokens whose keys, rebuilt from codes, have most softmax weight summed over a KV head's query heads."""

    def __init__(self, count: int, **options) -> None:
        super().__init__(**options)
        self.count = count

    def rebuilt(self) -> np.ndarray:
        """Returns the keys [K, n, H] of the tokens in pages, rebuilt from their centroids."""
        pairs = (zip(*head_pairs, strict=True) for head_pairs in zip(self.codes(), self.centroids, strict=True))
        return np.stack([np.concatenate([centroids[codes] for codes, centroids in head_pairs], axis=1) for head_pairs in pairs])

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        scores = np.einsum("kgh,knh->kgn", self.tokens.grouped(q), self.rebuilt()) / q.shape[-1] ** 0.5
        selected = [[self.sinks + i for i in best(weights, self.count)] for weights in softmax(scores).sum(1)]
        return [positions for positions in selected for _ in range(scores.shape[1])]


class ClusterKV(Coded):
    """ClusterKV: each query head takes the clusters of largest product with its query, the last one cut to the budget."""

    def __init__(self, count: int, **options) -> None:
        super().__init__(parts=1, cosine=True, **options)
        self.count = count

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        selection, codes = [], self.codes()
        for head, queries in enumerate(self.tokens.grouped(q)):
            for query in queries:
                positions = []
                for cluster in np.argsort(-(self.centroids[head][0] @ query), kind="stable"):
                    positions += [self.sinks + i for i in np.flatnonzero(codes[head][0] == cluster)]
                selection.append(sorted(positions[: self.count]))
        return selection


class RetroInfer(Paged):
    """RetroInfer: attends exactly to the best clusters of at most `count` tokens, and to the next best by their means.

    Clusters are ranked by the softmax weight of their mean key; the share `estimated` of all clusters counts by means. A prompt
    has as many clusters as pages; each later page is one cluster.
    """

    def __init__(self, count: int, estimated: float, iterations: int, **options) -> None:
        super().__init__(16, **options)
        self.count, self.share, self.clusters = count, estimated, []
        for keys in self.tokens.k[self.paged()].swapaxes(0, 1):
            centred = keys - keys.mean(0) if len(keys) else keys
            centroids = kmeans(centred, len(self.pages), iterations - 1, cosine=True) if len(keys) else []
            codes = nearest(centred, centroids, cosine=True) if len(keys) else np.zeros(0)
            self.clusters.append([(self.sinks + np.flatnonzero(codes == i)).tolist() for i in range(len(self.pages))])

    def end_step(self) -> None:
        num_pages = len(self.pages)
        super().end_step()
        for clusters in self.clusters:
            clusters += self.pages[num_pages:]

    def taken(self, q: np.ndarray, head: int) -> tuple[list[list[int]], list[list[int]]]:
        """Returns a KV head's clusters for exact attention and its clusters that count by their means, best first."""
        clusters = [cluster for cluster in self.clusters[head] if cluster]
        if not clusters:
            return [], []
        means = np.stack([self.tokens.k[cluster, head].mean(0) for cluster in clusters])
        weights = softmax(self.tokens.grouped(q)[head] @ means.T / q.shape[-1] ** 0.5).sum(0)
        order = [clusters[i] for i in np.argsort(-weights, kind="stable")]
        num_exact = 0
        while num_exact < len(order) and sum(map(len, order[: num_exact + 1])) <= self.count:
            num_exact += 1
        return order[:num_exact], order[num_exact : num_exact + int(np.ceil(self.share * len(order)))]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        exact = [self.taken(q, head)[0] for head in range(self.tokens.k.shape[1])]
        group = len(q) // len(exact)
        return [[*self.near(), *(p for cluster in clusters for p in cluster)] for clusters in exact for _ in range(group)]

    def attend(self, q: np.ndarray) -> np.ndarray:
        outputs = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            exact, estimated = self.taken(q, head)
            parts = [[p] for p in [*self.near(), *(p for cluster in exact for p in cluster)]] + estimated
            k, v = (np.stack([x[cluster, head].mean(0) for cluster in parts]) for x in (self.tokens.k, self.tokens.v))
            outputs.append(softmax(queries @ k.T / q.shape[-1] ** 0.5 + np.log([len(cluster) for cluster in parts])) @ v)
        return np.concatenate(outputs)
