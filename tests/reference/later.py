"""Later methods of other papers in plain numpy, one row, in the form of `reference_peers` and `reference_retrieval`."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.reference.oracles import Chooser
from tests.reference.peers import SnapKV, attention, best, softmax
from tests.reference.retrieval import Paged


class RocketKV(SnapKV):
    """RocketKV: of what SnapKV keeps, and of the decoded tokens, the `count` best by bounds of their pages in some channels."""

    def __init__(self, count: int, kept: int, window: int, kernel: int, **prompt: np.ndarray) -> None:
        super().__init__(kept, window, kernel, "max", "sum", **prompt)
        left = max(1.0, kept / (2 * count))
        page = math.ceil(math.sqrt(left))
        self.count, self.left, self.page = count, left, page if page <= left else 1

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions that each KV head attends to, sorted."""
        found = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            positions = self.positions[head]
            up = queries.sum(0) > 0
            channels = best(np.abs(queries).sum(0), max(1, int(queries.shape[1] * self.page / self.left)))
            scores = np.zeros((len(queries), len(positions)))
            for first in range(0, len(positions), self.page):
                keys = self.tokens.k[positions[first : first + self.page], head]
                bound = np.where(up, keys.max(0), keys.min(0))
                scores[:, first : first + self.page] = (queries[:, channels] @ bound[channels])[:, None]
            share = np.abs(queries[:, channels]).sum(1) / np.abs(queries).sum(1)
            weights = softmax(scores / np.sqrt(queries.shape[1] * share)[:, None]).sum(0)
            found.append(positions[best(weights, self.count)].tolist())
        return found

    def selected(self, q: np.ndarray) -> list[list[int]]:
        chosen = self.chosen(q)
        return [positions for positions in chosen for _ in range(len(q) // len(chosen))]

    def attend(self, q: np.ndarray) -> np.ndarray:
        chosen, queries = self.chosen(q), self.tokens.grouped(q)
        pairs = ((queries[head], self.tokens.k[at, head], self.tokens.v[at, head]) for head, at in enumerate(chosen))
        return np.concatenate([attention(*each) for each in pairs])


class VAttention(Chooser):
    """vAttention: between `sinks` and `window` the `top` tokens, and of all there some that are drawn, up to `most`.

    `draws` gives numbers [2, N, n] for the query heads and all tokens: the largest of those between are drawn, of the first
    numbers `least` to tell the bound by.
    """

    def __init__(
        self, sinks: int, window: int, top: int, least: int, most: int, bound: float, draws: Callable, **prompt: np.ndarray
    ) -> None:
        super().__init__(**prompt)
        self.sinks, self.window, self.top, self.least, self.most = sinks, window, top, least, most
        self.bound, self.draws = bound, draws  # `bound` is epsilon by the quantile of delta

    def taken(self, q: np.ndarray) -> list[tuple[list[int], list[int], float]]:
        """Returns of each query head the positions that are attended to exactly, those sampled, and what share these are."""
        n, found = len(self.tokens), []
        between = np.arange(self.sinks, max(n - self.window, self.sinks))
        near = [i for i in range(n) if i not in set(between)]
        first, then = self.draws(n)
        for head, scores in enumerate(self.scores(q).reshape(len(q), -1)):
            weights = np.exp(scores - scores.max())
            exact = {*near, *between[best(scores[between], self.top)]}
            least = min(self.least, len(between))
            told = weights[between[best(first[head, between], least)]]
            wanted = 0
            if len(told) > 1:
                total = weights[list(exact)].sum() + told.mean() * len(between)
                wanted = int(min(told.var(ddof=1) * (len(between) / (self.bound * total)) ** 2, self.most))
            count = min(max(wanted, least), len(between))
            sampled = set(between[best(then[head, between], count)]) - exact
            found.append((sorted(exact), sorted(sampled), count / len(between) if len(between) else 1.0))
        return found

    def selected(self, q: np.ndarray) -> list[list[int]]:
        return [exact + sampled for exact, sampled, _ in self.taken(q)]

    def attend(self, q: np.ndarray) -> np.ndarray:
        outputs, group = [], len(q) // self.tokens.k.shape[1]
        scores = self.scores(q).reshape(len(q), -1)
        for head, (exact, sampled, share) in enumerate(self.taken(q)):
            logits = np.append(scores[head, exact], scores[head, sampled] - np.log(share))
            outputs.append(softmax(logits) @ self.tokens.v[exact + sampled, head // group])
        return np.stack(outputs)


class InfiniGen(Paged):
    """InfiniGen: of each query head the tokens of highest score in `some` directions, as many as come near the highest.

    Directions are of the SVD of a KV head's queries in the prompt [n, N, H]; the number is the mean over heads, up to `count`.
    """

    def __init__(self, count: int, some: int, alpha: float, *, q: np.ndarray, **options) -> None:
        super().__init__(16, sinks=0, fill=1, q=q, **options)
        self.count, self.alpha, self.directions = count, alpha, []
        for queries in self.tokens.grouped(q).swapaxes(0, 1).reshape(self.tokens.k.shape[1], -1, q.shape[-1]):
            main = np.linalg.svd(queries)[2].T
            self.directions.append(main[:, best(np.abs(queries @ main).sum(0), some)])

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions of the tokens in pages that each query head attends to, sorted."""
        if not self.paged():
            return [[]] * len(q)
        pairs = zip(self.tokens.grouped(q), self.tokens.k[self.paged()].swapaxes(0, 1), self.directions, strict=True)
        scores = np.concatenate([(queries @ u) @ (keys @ u).T for queries, keys, u in pairs]) / q.shape[-1] ** 0.5
        number = int((scores > scores.max(1, keepdims=True) - self.alpha).sum(1).mean())
        return [best(each, min(number, self.count)) for each in scores]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        return [[*self.near(), *positions] for positions in self.chosen(q)]


class ParisKV(Paged):
    """ParisKV: of the tokens that get most votes the `count` whose products with the mean query are the largest by estimate.

    `turn` [H, H] is the random turn. Votes are given for each eight channels, by how a pattern of signs ranks there.
    """

    edges = np.array([0.0843, 0.1698, 0.2578, 0.3499, 0.4487, 0.5585, 0.6901])
    sizes = np.array([0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633])
    tiers = [Fraction(x, 100) for x in (5, 15, 30, 50, 75, 100)]

    def __init__(self, count: int, turn: np.ndarray, **options) -> None:
        super().__init__(16, **options)
        self.count, self.rerotate = count, np.asarray(turn, np.float64)

    def blocks(self, x: np.ndarray) -> np.ndarray:
        """Returns turned vectors [n, H / 8, 8]."""
        return (x @ self.rerotate).reshape(len(x), x.shape[1] // 8, 8)

    def rebuilt(self, head: int) -> np.ndarray:
        """Returns the keys of the tokens in pages, turned, as their codes have them [n, H / 8, 8]."""
        blocks = self.blocks(self.tokens.k[self.paged(), head])
        lengths = np.linalg.norm(blocks, axis=-1, keepdims=True)
        shares = np.abs(blocks) / lengths
        told = self.sizes[np.searchsorted(self.edges, shares)]
        lengths = (lengths / (told * shares).sum(-1, keepdims=True)).astype("bfloat16")
        return told * np.where(blocks >= 0, 1, -1) * lengths.astype(np.float64)

    def votes(self, q: np.ndarray, head: int) -> np.ndarray:
        """Returns the votes [n] that a turned query [H / 8, 8] gives to the tokens in pages."""
        signs = self.blocks(self.tokens.k[self.paged(), head]) >= 0
        votes = np.zeros(len(signs), int)
        for block, query in enumerate(q):
            scores = np.where(signs[:, block], query, -query).sum(1)
            # A token whose pattern is more than one of a full tier's comes too late.
            before = (scores[:, None] > scores[None] + 1e-9).sum(0)
            votes += sum(before < math.ceil(tier * len(signs) / 2) for tier in self.tiers)
        return votes

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions of the tokens in pages that each KV head attends to, sorted."""
        found, n = [], len(self.paged())
        for head, query in enumerate(self.blocks(self.tokens.grouped(q).mean(1))):
            candidates = best(self.votes(query, head), max(math.ceil(n / 2), self.count))
            worth = (self.rebuilt(head)[candidates] * query).sum((1, 2))
            found.append(sorted(self.sinks + candidates[i] for i in best(worth, self.count)))
        return found

    def selected(self, q: np.ndarray) -> list[list[int]]:
        group = len(q) // self.tokens.k.shape[1]
        return [[*self.near(), *positions] for positions in self.chosen(q) for _ in range(group)]
