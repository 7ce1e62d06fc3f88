"""The oracle policies in plain float64 numpy, one row: what tests/cache/test_oracles.py compares the policies with.

Methods, shapes and positions are those of `tests.reference.peers`. Each query head has a list of the positions it attends to.
"""

from __future__ import annotations

import numpy as np

from tests.reference.peers import Tokens, attention, best, softmax


class Chooser:
    """Base class: every query head attends exactly to the positions that `selected` returns for it."""

    def __init__(self, *, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        del q  # only the queries of new tokens choose positions
        self.tokens = Tokens(k, v)

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends a token's key and value [K, H]."""
        self.tokens.append(k[None], v[None])

    def scores(self, q: np.ndarray) -> np.ndarray:
        """Returns the scores [K, G, n] of all tokens for the newest token's queries [N, H]."""
        return np.einsum("kgh,nkh->kgn", self.tokens.grouped(q), self.tokens.k) / q.shape[-1] ** 0.5

    def selected(self, q: np.ndarray) -> list[list[int]]:
        """Returns the sorted positions that each query head attends to."""
        raise NotImplementedError

    def keys_of(self, head: int, positions: list[int]) -> np.ndarray:
        """Returns the keys [n, H] that attention uses at `positions`; ShadowKV returns approximate keys."""
        return self.tokens.k[positions, head]

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Returns the attention [N, H] of the newest token's queries."""
        outputs, group = [], len(q) // self.tokens.k.shape[1]
        for n, positions in enumerate(self.selected(q)):
            k, v = self.keys_of(n // group, positions), self.tokens.v[positions, n // group]
            outputs.append(attention(np.asarray(q[n], np.float64), k, v))
        return np.stack(outputs)


class TopK(Chooser):
    """The `budget` tokens of highest score per query head; with group "sum", of highest softmax weight summed per KV head."""

    def __init__(self, budget: int, group: str = "none", **prompt: np.ndarray) -> None:
        super().__init__(**prompt)
        self.budget, self.group = budget, group

    def selected(self, q: np.ndarray) -> list[list[int]]:
        scores = self.scores(q)
        if self.group == "sum":
            scores = np.broadcast_to(softmax(scores).sum(1, keepdims=True), scores.shape)
        return [best(head_scores, self.budget) for head_scores in scores.reshape(len(q), -1)]


class TopP(Chooser):
    """For each query head the fewest tokens of highest score whose softmax weights add up to `mass`."""

    def __init__(self, mass: float, **prompt: np.ndarray) -> None:
        super().__init__(**prompt)
        self.mass = mass

    def selected(self, q: np.ndarray) -> list[list[int]]:
        selected = []
        for weights in softmax(self.scores(q)).reshape(len(q), -1):
            below_mass = np.cumsum(-np.sort(-weights)) < self.mass
            selected.append(best(weights, 1 + below_mass.sum()))
        return selected


class TopKPages(Chooser):
    """The newest page, and the others of largest softmax weight summed over their tokens and a KV head's query heads."""

    def __init__(self, budget: int, page_size: int, **prompt: np.ndarray) -> None:
        super().__init__(**prompt)
        self.count, self.page_size = budget // page_size, page_size

    def selected(self, q: np.ndarray) -> list[list[int]]:
        selected, n = [], len(self.tokens)
        pages = [range(i, min(i + self.page_size, n)) for i in range(0, n, self.page_size)]
        for weights in softmax(self.scores(q)):
            mass = np.array([weights[:, page].sum() for page in pages])
            mass[-1] = np.inf
            selected += [[p for i in best(mass, self.count) for p in pages[i]]] * len(weights)
        return selected
