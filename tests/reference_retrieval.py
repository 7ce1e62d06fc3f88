"""Retrieval methods of other papers in plain numpy, one row, in the form of `reference_oracles`: all is float64."""

from __future__ import annotations

import numpy as np

from tests.reference_oracles import Chooser
from tests.reference_peers import best, rotate, softmax


class Paged(Chooser):
    """Sinks, pages in order of position, and a window of the newest tokens; a page leaves it in every `page_size`-th step.

    The window has room for a page more than the `fill` tokens that a prompt leaves there, of which a short prompt has fewer. A
    page may be empty for that reason: it has its number.
    """

    def __init__(self, page_size: int, *, sinks: int, fill: int, **prompt: np.ndarray) -> None:
        super().__init__(**prompt)
        n = len(self.tokens)
        self.page_size, self.sinks, self.fill, self.steps = page_size, min(sinks, n), fill, 0
        self.start = max(n - fill, self.sinks)  # of the window
        self.pages = [list(range(i, min(i + page_size, self.start))) for i in range(self.sinks, self.start, page_size)]

    def near(self) -> list[int]:
        """Returns the positions of sinks and window."""
        return [*range(self.sinks), *range(self.start, len(self.tokens))]

    def paged(self) -> list[int]:
        """Returns the positions of the tokens in pages."""
        return list(range(self.sinks, self.start))

    def end_step(self) -> None:
        """Moves the window's oldest slots behind the other pages, as a page, in every `page_size`-th step."""
        self.steps += 1
        if self.steps % self.page_size == 0:
            end = max(len(self.tokens) - self.fill, self.start)
            self.pages.append(list(range(self.start, end)))
            self.start = end


class ArkVale(Paged):
    """ArkVale: the pages of highest mean score; a page is a box of the mean distance from the middle of its keys' bounds."""

    def __init__(self, page_size: int, count: int, heads: str = "layer", **options) -> None:
        super().__init__(page_size, **options)
        self.count, self.heads = count, heads

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the numbers of each KV head's pages, sorted."""
        grouped = self.tokens.grouped(q)
        worth = np.full((len(grouped), len(self.pages)), -np.inf)
        for i, page in enumerate(self.pages):
            if page:
                keys = self.tokens.k[page]  # n K H
                middle = (keys.max(0) + keys.min(0)) / 2
                far = np.abs(keys - middle).mean(0)
                ends = [grouped * x[:, None] for x in (middle - far, middle + far)]
                worth[:, i] = np.maximum(*ends).sum(-1).mean(1)
        if self.heads == "layer":
            worth[:] = worth.mean(0)
        return [[i for i in best(each, self.count) if self.pages[i]] for each in worth]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        group = len(q) // self.tokens.k.shape[1]
        return [[*self.near(), *(p for i in chosen for p in self.pages[i])] for chosen in self.chosen(q) for _ in range(group)]


class OmniKV(Chooser):
    """A layer of OmniKV behind a filter with keys of its own: the filter's best tokens, and the newest decoded ones.

    The filter has the same queries, and keys that are `mirror` times this layer's [H].
    """

    def __init__(self, budget: int, generated: int, mirror: np.ndarray, **prompt: np.ndarray) -> None:
        super().__init__(**prompt)
        self.budget, self.generated, self.mirror, self.text = budget, generated, mirror, len(self.tokens)

    def selected(self, q: np.ndarray) -> list[list[int]]:
        n = len(self.tokens)
        first = max(self.text, n - self.generated)
        worth = np.einsum("kgh,nkh->nkg", self.tokens.grouped(q), self.tokens.k[:first] * self.mirror).max((1, 2))
        return [[*best(worth, self.budget), *range(first, n)]] * len(q)


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


class ShadowKV(Paged):
    """ShadowKV: `outliers` pages of a prompt, and those whose mean key has most softmax weight with a query head, the largest.

    The other pages of a prompt have keys of a low rank, all KV heads together, before they are turned by RoPE of base `theta`.
    """

    def __init__(self, outliers: int, count: int, rank: int, theta: float, **options) -> None:
        super().__init__(8, sinks=0, **options)
        self.count, k = count, self.tokens.k
        where = np.arange(len(k))
        u, s, v = np.linalg.svd(rotate(k, -where, theta).reshape(len(k), -1), full_matrices=False)
        self.rebuilt = rotate(((u[:, :rank] * s[:rank]) @ v[:rank]).reshape(k.shape), where, theta)
        self.prompt_pages = len(self.pages)
        cosine = np.zeros((k.shape[1], self.prompt_pages))
        for i, page in enumerate(self.pages):
            keys, mean = k[page], k[page].mean(0)
            cosine[:, i] = ((keys * mean).sum(-1) / np.linalg.norm(keys, axis=-1) / np.linalg.norm(mean, axis=-1)).min(0)
        self.kept = [best(-each, outliers) for each in cosine]

    def keys_of(self, head: int, positions: list[int]) -> np.ndarray:
        low = {p for i in range(self.prompt_pages) if i not in self.kept[head] for p in self.pages[i]}
        return np.stack([(self.rebuilt if p in low else self.tokens.k)[p, head] for p in positions])

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the numbers of each KV head's pages, sorted."""
        found = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            free = [i for i, page in enumerate(self.pages) if page and i not in self.kept[head]]
            taken = []
            if free:
                means = np.stack([self.tokens.k[self.pages[i], head].mean(0) for i in free])
                worth = softmax(queries @ means.T / q.shape[-1] ** 0.5).max(0)
                taken = [free[i] for i in best(worth, self.count)]
            found.append(sorted([*self.kept[head], *taken]))
        return found

    def selected(self, q: np.ndarray) -> list[list[int]]:
        group = len(q) // self.tokens.k.shape[1]
        return [[*(p for i in chosen for p in self.pages[i]), *self.near()] for chosen in self.chosen(q) for _ in range(group)]


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

    def attend(self, q: np.ndarray) -> np.ndarray:
        outputs = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            exact, estimated = self.taken(q, head)
            parts = [[p] for p in [*self.near(), *(p for each in exact for p in each)]] + estimated
            k, v = (np.stack([x[each, head].mean(0) for each in parts]) for x in (self.tokens.k, self.tokens.v))
            outputs.append(softmax(queries @ k.T / q.shape[-1] ** 0.5 + np.log([len(each) for each in parts])) @ v)
        return np.concatenate(outputs)
