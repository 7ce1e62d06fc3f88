"""k-means in plain numpy and the retrieval methods that use it, one row, in the form of `reference_retrieval`: all is float64."""

from __future__ import annotations

import numpy as np

from tests.reference.peers import best, softmax
from tests.reference.retrieval import Paged


def kmeans(x: np.ndarray, count: int, iterations: int, *, cosine: bool = False) -> np.ndarray:
    """Returns the centroids [count, d] of x [n, d] after Lloyd's iterations that begin at vectors at even steps."""
    if not len(x):
        return np.zeros((count, x.shape[1]))
    centroids = np.stack([x[i * len(x) // count] for i in range(count)])
    for _ in range(iterations):
        codes = nearest(x, centroids, cosine=cosine)
        centroids = np.stack([x[codes == i].mean(0) if (codes == i).any() else old for i, old in enumerate(centroids)])
    return centroids


def nearest(x: np.ndarray, centroids: np.ndarray, *, cosine: bool = False) -> np.ndarray:
    """Returns which centroid [count, d] each of x [n, d] is nearest to, by angle or by distance."""
    if cosine:
        x, centroids = (y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-30) for y in (x, centroids))
    return np.square(x[:, None] - centroids[None]).sum(-1).argmin(1)


class Coded(Paged):
    """Tokens in pages have, part by part of their keys, the nearest of centroids made of the first of them that there were."""

    def __init__(self, parts: int, centroids: int, iterations: int, *, cosine: bool = False, **options) -> None:
        super().__init__(16, **options)
        self.parts, self.made_by, self.cosine, self.centroids = parts, (centroids, iterations), cosine, None
        self._make()

    def _make(self) -> None:
        """Makes centroids for each KV head and part [count, H / parts], if there are none and there are tokens."""
        if self.centroids is None and self.paged():
            self.centroids = [[kmeans(x, *self.made_by, cosine=self.cosine) for x in parts] for parts in self.keys()]

    def keys(self) -> list[list[np.ndarray]]:
        """Returns the keys of the tokens in pages [n, H / parts] of each KV head and part."""
        return [np.split(x, self.parts, axis=1) for x in self.tokens.k[self.paged()].swapaxes(0, 1)]

    def end_step(self) -> None:
        super().end_step()
        self._make()

    def codes(self) -> list[list[np.ndarray]]:
        """Returns which centroids the tokens in pages have, [n] of each KV head and part."""
        pairs = (zip(*each, strict=True) for each in zip(self.keys(), self.centroids, strict=True))
        return [[nearest(x, centroids, cosine=self.cosine) for x, centroids in each] for each in pairs]

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions of the tokens in pages that each query head attends to, sorted."""
        raise NotImplementedError

    def selected(self, q: np.ndarray) -> list[list[int]]:
        return [[*self.near(), *positions] for positions in (self.chosen(q) if self.paged() else [[]] * len(q))]


class PQCache(Coded):
    """PQCache: the tokens whose rebuilt keys have most softmax weight, summed over a KV head's query heads."""

    def __init__(self, count: int, **options) -> None:
        super().__init__(**options)
        self.count = count

    def rebuilt(self) -> np.ndarray:
        """Returns the keys [K, n, H] of the tokens in pages, made of their centroids."""
        pairs = (zip(*each, strict=True) for each in zip(self.codes(), self.centroids, strict=True))
        return np.stack([np.concatenate([centroids[codes] for codes, centroids in each], axis=1) for each in pairs])

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        scores = np.einsum("kgh,knh->kgn", self.tokens.grouped(q), self.rebuilt()) / q.shape[-1] ** 0.5
        found = [[self.sinks + i for i in best(weights, self.count)] for weights in softmax(scores).sum(1)]
        return [positions for positions in found for _ in range(scores.shape[1])]


class ClusterKV(Coded):
    """ClusterKV: of each query head whole clusters by its product with their centroids, the last of them cut to the budget."""

    def __init__(self, count: int, **options) -> None:
        super().__init__(parts=1, cosine=True, **options)
        self.count = count

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        found, codes = [], self.codes()
        for head, queries in enumerate(self.tokens.grouped(q)):
            for query in queries:
                taken = []
                for cluster in np.argsort(-(self.centroids[head][0] @ query), kind="stable"):
                    taken += [self.sinks + i for i in np.flatnonzero(codes[head][0] == cluster)]
                found.append(sorted(taken[: self.count]))
        return found


class RetroInfer(Paged):
    """RetroInfer: the clusters of largest softmax weight that `count` tokens hold, and a share of all by their means.

    A prompt has as many clusters as pages; each later page is one.
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
        known = len(self.pages)
        super().end_step()
        for clusters in self.clusters:
            clusters += self.pages[known:]

    def taken(self, q: np.ndarray, head: int) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the clusters of a KV head that are attended to exactly and those that are estimated, best first."""
        clusters = [each for each in self.clusters[head] if each]
        if not clusters:
            return [], []
        means = np.stack([self.tokens.k[each, head].mean(0) for each in clusters])
        worth = softmax(self.tokens.grouped(q)[head] @ means.T / q.shape[-1] ** 0.5).sum(0)
        order = [clusters[i] for i in np.argsort(-worth, kind="stable")]
        exact = 0
        while exact < len(order) and sum(map(len, order[: exact + 1])) <= self.count:
            exact += 1
        return order[:exact], order[exact : exact + int(np.ceil(self.share * len(order)))]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        exact = [self.taken(q, head)[0] for head in range(self.tokens.k.shape[1])]
        group = len(q) // len(exact)
        return [[*self.near(), *(p for each in clusters for p in each)] for clusters in exact for _ in range(group)]

    def attend(self, q: np.ndarray) -> np.ndarray:
        outputs = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            exact, estimated = self.taken(q, head)
            parts = [[p] for p in [*self.near(), *(p for each in exact for p in each)]] + estimated
            k, v = (np.stack([x[each, head].mean(0) for each in parts]) for x in (self.tokens.k, self.tokens.v))
            outputs.append(softmax(queries @ k.T / q.shape[-1] ** 0.5 + np.log([len(each) for each in parts])) @ v)
        return np.concatenate(outputs)
