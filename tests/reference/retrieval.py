"""ArkVale, OmniKV, ShadowKV and MagicPIG in plain float64 numpy, one row, for the tests in tests/cache.

Methods, shapes and positions are those of `tests.reference.oracles`.
"""

from __future__ import annotations

import numpy as np

from tests.reference.oracles import Chooser
from tests.reference.peers import best, rotate, softmax


class Paged(Chooser):
    """Sinks, pages in order of position, and a window of the newest tokens.

    A prompt leaves its last `fill` tokens in the window, or fewer if it is short. Every `page_size`-th step moves `page_size`
    slots out of the window. After a short prompt some of these slots hold no token, so a page may be partial or empty; an
    empty page is numbered like the others.
    """

    def __init__(self, page_size: int, *, sinks: int, fill: int, **prompt: np.ndarray) -> None:
        super().__init__(**prompt)
        n = len(self.tokens)
        self.page_size, self.sinks, self.fill, self.steps = page_size, min(sinks, n), fill, 0
        self.start = max(n - fill, self.sinks)  # first position of the window
        self.pages = [list(range(i, min(i + page_size, self.start))) for i in range(self.sinks, self.start, page_size)]

    def near(self) -> list[int]:
        """Returns the positions of the sinks and the window."""
        return [*range(self.sinks), *range(self.start, len(self.tokens))]

    def paged(self) -> list[int]:
        """Returns the positions of all tokens in pages."""
        return list(range(self.sinks, self.start))

    def end_step(self) -> None:
        """Appends the window's oldest slots to the pages as a new page, in every `page_size`-th step."""
        self.steps += 1
        if self.steps % self.page_size == 0:
            end = max(len(self.tokens) - self.fill, self.start)
            self.pages.append(list(range(self.start, end)))
            self.start = end


class ArkVale(Paged):
    """ArkVale: the pages of highest score, mean over query heads.

    A page's score is the largest q.k in a box: the middle of its keys' bounds, plus and minus the keys' mean distance from it.
    """

    def __init__(self, page_size: int, count: int, heads: str = "layer", **options) -> None:
        super().__init__(page_size, **options)
        self.count, self.heads = count, heads

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the page numbers that each KV head selects, sorted."""
        grouped = self.tokens.grouped(q)
        scores = np.full((len(grouped), len(self.pages)), -np.inf)
        for i, page in enumerate(self.pages):
            if page:
                keys = self.tokens.k[page]  # n K H
                middle = (keys.max(0) + keys.min(0)) / 2
                distance = np.abs(keys - middle).mean(0)
                products = [grouped * x[:, None] for x in (middle - distance, middle + distance)]
                scores[:, i] = np.maximum(*products).sum(-1).mean(1)
        if self.heads == "layer":
            scores[:] = scores.mean(0)
        return [[i for i in best(head_scores, self.count) if self.pages[i]] for head_scores in scores]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        group = len(q) // self.tokens.k.shape[1]
        return [[*self.near(), *(p for i in chosen for p in self.pages[i])] for chosen in self.chosen(q) for _ in range(group)]


class OmniKV(Chooser):
    """OmniKV, a layer after a filter layer: the tokens with the filter's highest scores, and the newest decoded tokens.

    The filter layer has the same queries; its keys are this layer's keys times `mirror` [H].
    """

    def __init__(self, budget: int, generated: int, mirror: np.ndarray, **prompt: np.ndarray) -> None:
        super().__init__(**prompt)
        self.budget, self.generated, self.mirror, self.prompt_length = budget, generated, mirror, len(self.tokens)

    def selected(self, q: np.ndarray) -> list[list[int]]:
        n = len(self.tokens)
        first = max(self.prompt_length, n - self.generated)
        scores = np.einsum("kgh,nkh->nkg", self.tokens.grouped(q), self.tokens.k[:first] * self.mirror).max((1, 2))
        return [[*best(scores, self.budget), *range(first, n)]] * len(q)


class ShadowKV(Paged):
    """ShadowKV: the `outliers` prompt pages, and the pages whose mean key has the largest softmax weight of any query head.

    The other prompt pages have low-rank keys, of all KV heads together; these are factored without RoPE, whose base is `theta`.
    """

    def __init__(self, outliers: int, count: int, rank: int, theta: float, **options) -> None:
        super().__init__(8, sinks=0, **options)
        self.count, k = count, self.tokens.k
        positions = np.arange(len(k))
        u, s, v = np.linalg.svd(rotate(k, -positions, theta).reshape(len(k), -1), full_matrices=False)
        self.rebuilt = rotate(((u[:, :rank] * s[:rank]) @ v[:rank]).reshape(k.shape), positions, theta)
        self.prompt_pages = len(self.pages)
        cosine = np.zeros((k.shape[1], self.prompt_pages))
        for i, page in enumerate(self.pages):
            keys, mean = k[page], k[page].mean(0)
            cosine[:, i] = ((keys * mean).sum(-1) / np.linalg.norm(keys, axis=-1) / np.linalg.norm(mean, axis=-1)).min(0)
        self.outlier_pages = [best(-similarity, outliers) for similarity in cosine]

    def keys_of(self, head: int, positions: list[int]) -> np.ndarray:
        low_rank = {p for i in range(self.prompt_pages) if i not in self.outlier_pages[head] for p in self.pages[i]}
        return np.stack([(self.rebuilt if p in low_rank else self.tokens.k)[p, head] for p in positions])

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the page numbers that each KV head selects, sorted."""
        selection = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            free = [i for i, page in enumerate(self.pages) if page and i not in self.outlier_pages[head]]
            selected = []
            if free:
                means = np.stack([self.tokens.k[self.pages[i], head].mean(0) for i in free])
                weights = softmax(queries @ means.T / q.shape[-1] ** 0.5).max(0)
                selected = [free[i] for i in best(weights, self.count)]
            selection.append(sorted([*self.outlier_pages[head], *selected]))
        return selection

    def selected(self, q: np.ndarray) -> list[list[int]]:
        group = len(q) // self.tokens.k.shape[1]
        return [[*(p for i in chosen for p in self.pages[i]), *self.near()] for chosen in self.chosen(q) for _ in range(group)]


class MagicPIG(Paged):
    """MagicPIG: the tokens that share a query head's hash in at least two tables, the `count` with most such tables.

    A table's hash says on which sides of its planes [K, H, tables, bits] a vector lies; the mean of the row's first keys in
    pages is subtracted from keys first. A token's weight is divided by the probability that it is sampled.
    """

    def __init__(self, count: int, planes: np.ndarray, **options) -> None:
        super().__init__(16, **options)
        self.count, self.planes, self.mean = count, np.asarray(planes, np.float64), None
        self._set_mean()

    def _set_mean(self) -> None:
        if self.mean is None and self.paged():
            self.mean = self.tokens.k[self.paged()].mean(0)

    def end_step(self) -> None:
        super().end_step()
        self._set_mean()

    def sampled(self, q: np.ndarray, head: int) -> tuple[list[int], np.ndarray]:
        """Returns the positions that a query [H] samples, sorted, and the probability of sampling each."""
        if not self.paged():
            return [], np.zeros(0)
        keys, planes = self.tokens.k[self.paged(), head] - self.mean[head], self.planes[head]
        shared_tables = ((np.einsum("nh,hlb->nlb", keys, planes) > 0) == (np.einsum("h,hlb->lb", q, planes) > 0)).all(-1).sum(1)
        selected = [i for i in best(shared_tables, self.count) if shared_tables[i] >= 2]
        cosine = keys[selected] @ q / np.linalg.norm(keys[selected], axis=1) / np.linalg.norm(q)
        tables, bits = planes.shape[1:]
        u = (1 - np.arccos(cosine) / np.pi) ** bits
        return [self.sinks + i for i in selected], 1 - (1 - u) ** tables - tables * u * (1 - u) ** (tables - 1)

    def selected(self, q: np.ndarray) -> list[list[int]]:
        groups = enumerate(self.tokens.grouped(q))
        return [[*self.near(), *self.sampled(query, head)[0]] for head, queries in groups for query in queries]

    def attend(self, q: np.ndarray) -> np.ndarray:
        outputs = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            for query in queries:
                positions, probability = self.sampled(query, head)
                tokens = [*self.near(), *positions]
                logits = self.tokens.k[tokens, head] @ query / q.shape[-1] ** 0.5
                logits[len(self.near()) :] -= np.log(probability + 1e-4)
                outputs.append(softmax(logits) @ self.tokens.v[tokens, head])
        return np.stack(outputs)
