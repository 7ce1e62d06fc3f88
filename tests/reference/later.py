"""RocketKV, vAttention, InfiniGen and ParisKV in plain numpy, one row, for tests/cache/test_later_policies.py.

Methods, shapes and positions are those of `tests.reference.peers` and `tests.reference.retrieval`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.reference.oracles import Chooser
from tests.reference.peers import SnapKV, attention, best, softmax
from tests.reference.retrieval import Paged


class RocketKV(SnapKV):
    """RocketKV: the `count` best of SnapKV's tokens and the decoded ones, by bounds of small pages in the main channels."""

    def __init__(self, count: int, kept: int, window: int, kernel: int, **prompt: np.ndarray) -> None:
        super().__init__(kept, window, kernel, "max", "sum", **prompt)
        compression = max(1.0, kept / (2 * count))
        page_size = math.ceil(math.sqrt(compression))
        self.count, self.compression, self.page_size = count, compression, page_size if page_size <= compression else 1

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the sorted positions that each KV head attends to."""
        selection = []
        for head, queries in enumerate(self.tokens.grouped(q)):
            positions = self.positions[head]
            positive = queries.sum(0) > 0
            channels = best(np.abs(queries).sum(0), max(1, int(queries.shape[1] * self.page_size / self.compression)))
            scores = np.zeros((len(queries), len(positions)))
            for first in range(0, len(positions), self.page_size):
                keys = self.tokens.k[positions[first : first + self.page_size], head]
                bound = np.where(positive, keys.max(0), keys.min(0))
                scores[:, first : first + self.page_size] = (queries[:, channels] @ bound[channels])[:, None]
            covered = np.abs(queries[:, channels]).sum(1) / np.abs(queries).sum(1)
            weights = softmax(scores / np.sqrt(queries.shape[1] * covered)[:, None]).sum(0)
            selection.append(positions[best(weights, self.count)].tolist())
        return selection

    def selected(self, q: np.ndarray) -> list[list[int]]:
        chosen = self.chosen(q)
        return [positions for positions in chosen for _ in range(len(q) // len(chosen))]

    def attend(self, q: np.ndarray) -> np.ndarray:
        chosen, queries = self.chosen(q), self.tokens.grouped(q)
        pairs = (
            (queries[head], self.tokens.k[positions, head], self.tokens.v[positions, head])
            for head, positions in enumerate(chosen)
        )
        return np.concatenate([attention(*pair) for pair in pairs])


class VAttention(Chooser):
    """vAttention: sinks, window, the `top` best tokens between them, and a random sample of up to `most` of these.

    `draws(n)` returns random numbers [2, N, n] for query heads and tokens; the tokens with the largest numbers are drawn. The
    first numbers draw `least` tokens to size the sample by, the second draw the sample.
    """

    def __init__(
        self, sinks: int, window: int, top: int, least: int, most: int, bound: float, draws: Callable, **prompt: np.ndarray
    ) -> None:
        super().__init__(**prompt)
        self.sinks, self.window, self.top, self.least, self.most = sinks, window, top, least, most
        self.bound, self.draws = bound, draws  # `bound`: epsilon over the quantile of delta

    def taken(self, q: np.ndarray) -> list[tuple[list[int], list[int], float]]:
        """Returns for each query head the exact positions, the sampled ones, and the probability of being sampled."""
        n, selection = len(self.tokens), []
        between = np.arange(self.sinks, max(n - self.window, self.sinks))
        resident = [i for i in range(n) if i not in set(between)]
        base_draws, sample_draws = self.draws(n)
        for head, scores in enumerate(self.scores(q).reshape(len(q), -1)):
            weights = np.exp(scores - scores.max())
            exact = {*resident, *between[best(scores[between], self.top)]}
            num_base = min(self.least, len(between))
            base_weights = weights[between[best(base_draws[head, between], num_base)]]
            num_needed = 0
            if len(base_weights) > 1:
                total = weights[list(exact)].sum() + base_weights.mean() * len(between)
                num_needed = int(min(base_weights.var(ddof=1) * (len(between) / (self.bound * total)) ** 2, self.most))
            count = min(max(num_needed, num_base), len(between))
            sampled = set(between[best(sample_draws[head, between], count)]) - exact
            selection.append((sorted(exact), sorted(sampled), count / len(between) if len(between) else 1.0))
        return selection

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
    """InfiniGen: each query head takes the tokens of highest score in `some` directions.

    Directions come from the SVD of a KV head's prompt queries [n, N, H]. Their number is the mean over heads of how many scores
    are within `alpha` of the highest, at most `count`.
    """

    def __init__(self, count: int, some: int, alpha: float, *, q: np.ndarray, **options) -> None:
        super().__init__(16, sinks=0, fill=1, q=q, **options)
        self.count, self.alpha, self.directions = count, alpha, []
        for queries in self.tokens.grouped(q).swapaxes(0, 1).reshape(self.tokens.k.shape[1], -1, q.shape[-1]):
            axes = np.linalg.svd(queries)[2].T
            self.directions.append(axes[:, best(np.abs(queries @ axes).sum(0), some)])

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the sorted positions of the tokens in pages that each query head attends to."""
        if not self.paged():
            return [[]] * len(q)
        pairs = zip(self.tokens.grouped(q), self.tokens.k[self.paged()].swapaxes(0, 1), self.directions, strict=True)
        scores = np.concatenate([(queries @ u) @ (keys @ u).T for queries, keys, u in pairs]) / q.shape[-1] ** 0.5
        number = int((scores > scores.max(1, keepdims=True) - self.alpha).sum(1).mean())
        return [best(head_scores, min(number, self.count)) for head_scores in scores]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        return [[*self.near(), *positions] for positions in self.chosen(q)]


class ParisKV(Paged):
    """ParisKV: of the tokens with most votes, the `count` of largest estimated product with the mean query.

    `turn` [H, H] is the random rotation. A token gets votes for each block of eight channels, by the rank of its sign pattern.
    """

    edges = np.array([0.0843, 0.1698, 0.2578, 0.3499, 0.4487, 0.5585, 0.6901])
    sizes = np.array([0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633])
    tiers = [Fraction(x, 100) for x in (5, 15, 30, 50, 75, 100)]

    def __init__(self, count: int, turn: np.ndarray, **options) -> None:
        super().__init__(16, **options)
        self.count, self.rotation = count, np.asarray(turn, np.float64)

    def blocks(self, x: np.ndarray) -> np.ndarray:
        """Returns the vectors x [n, H] rotated, in blocks [n, H / 8, 8]."""
        return (x @ self.rotation).reshape(len(x), x.shape[1] // 8, 8)

    def rebuilt(self, head: int) -> np.ndarray:
        """Returns the rotated keys [n, H / 8, 8] of the tokens in pages, rebuilt from their codes."""
        blocks = self.blocks(self.tokens.k[self.paged(), head])
        lengths = np.linalg.norm(blocks, axis=-1, keepdims=True)
        shares = np.abs(blocks) / lengths
        sizes = self.sizes[np.searchsorted(self.edges, shares)]
        lengths = (lengths / (sizes * shares).sum(-1, keepdims=True)).astype("bfloat16")
        return sizes * np.where(blocks >= 0, 1, -1) * lengths.astype(np.float64)

    def votes(self, q: np.ndarray, head: int) -> np.ndarray:
        """Returns the votes [n] of a rotated query [H / 8, 8] for the tokens in pages."""
        signs = self.blocks(self.tokens.k[self.paged(), head]) >= 0
        votes = np.zeros(len(signs), int)
        for block, query in enumerate(q):
            scores = np.where(signs[:, block], query, -query).sum(1)
            # A token gets a tier's vote if fewer tokens than the tier holds have a better pattern.
            better = (scores[:, None] > scores[None] + 1e-9).sum(0)
            votes += sum(better < math.ceil(tier * len(signs) / 2) for tier in self.tiers)
        return votes

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the sorted positions of the tokens in pages that each KV head attends to."""
        selection, n = [], len(self.paged())
        for head, query in enumerate(self.blocks(self.tokens.grouped(q).mean(1))):
            candidates = best(self.votes(query, head), max(math.ceil(n / 2), self.count))
            products = (self.rebuilt(head)[candidates] * query).sum((1, 2))
            selection.append(sorted(self.sinks + candidates[i] for i in best(products, self.count)))
        return selection

    def selected(self, q: np.ndarray) -> list[list[int]]:
        group = len(q) // self.tokens.k.shape[1]
        return [[*self.near(), *positions] for positions in self.chosen(q) for _ in range(group)]
