"""Later methods of other papers in plain numpy, one row, in the form of `reference_peers` and `reference_retrieval`."""

from __future__ import annotations

import math

import numpy as np

from tests.reference_peers import SnapKV, attention, best, softmax


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

    def attend(self, q: np.ndarray) -> np.ndarray:
        chosen, queries = self.chosen(q), self.tokens.grouped(q)
        pairs = ((queries[head], self.tokens.k[at, head], self.tokens.v[at, head]) for head, at in enumerate(chosen))
        return np.concatenate([attention(*each) for each in pairs])
