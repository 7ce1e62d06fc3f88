"""Retrieval methods of other papers in plain numpy, one row, in the form of `reference_oracles`: all is float64."""

from __future__ import annotations

import numpy as np

from tests.reference.oracles import Chooser
from tests.reference.peers import best, rotate, softmax


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


class MagicPIG(Paged):
    """MagicPIG: of the tokens that have a query head's hash in two tables the `count` that agree in most, weighed anew.

    A table's hash is on which sides of its planes [K, H, tables, bits] a vector lies, a key less the mean of a row's first text.
    """

    def __init__(self, count: int, planes: np.ndarray, **options) -> None:
        super().__init__(16, **options)
        self.count, self.planes, self.mean = count, np.asarray(planes, np.float64), None
        self._around()

    def _around(self) -> None:
        if self.mean is None and self.paged():
            self.mean = self.tokens.k[self.paged()].mean(0)

    def end_step(self) -> None:
        super().end_step()
        self._around()

    def sampled(self, q: np.ndarray, head: int) -> tuple[list[int], np.ndarray]:
        """Returns the positions that a query [H] samples, sorted, and how likely each was."""
        if not self.paged():
            return [], np.zeros(0)
        keys, planes = self.tokens.k[self.paged(), head] - self.mean[head], self.planes[head]
        same = ((np.einsum("nh,hlb->nlb", keys, planes) > 0) == (np.einsum("h,hlb->lb", q, planes) > 0)).all(-1).sum(1)
        taken = [i for i in best(same, self.count) if same[i] >= 2]
        cosine = keys[taken] @ q / np.linalg.norm(keys[taken], axis=1) / np.linalg.norm(q)
        tables, bits = planes.shape[1:]
        u = (1 - np.arccos(cosine) / np.pi) ** bits
        return [self.sinks + i for i in taken], 1 - (1 - u) ** tables - tables * u * (1 - u) ** (tables - 1)

    def selected(self, q: np.ndarray) -> list[list[int]]:
        groups = enumerate(self.tokens.grouped(q))
        return [[*self.near(), *self.sampled(query, head)[0]] for head, queries in groups for query in queries]

    def attend(self, q: np.ndarray) -> np.ndarray:
        outputs = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            for query in queries:
                positions, likely = self.sampled(query, head)
                tokens = [*self.near(), *positions]
                logits = self.tokens.k[tokens, head] @ query / q.shape[-1] ** 0.5
                logits[len(self.near()) :] -= np.log(likely + 1e-4)
                outputs.append(softmax(logits) @ self.tokens.v[tokens, head])
        return np.stack(outputs)
