"""The coded policy in plain numpy, one row and one KV head: what tests/cache/test_coded.py compares it with."""

from __future__ import annotations

import numpy as np

from tests.reference.packed import Packed


def line(keys: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns offset and step of each channel of a page [p, H]: the least-squares line through (code, key).

    A code is first the nearest of 2^bits numbers from the least key to the largest. The channel 0, 1, 3 in 1 bit has the codes
    0, 0, 1, offset 0.5 and step 2.5.
    """
    low, width = keys.min(0), np.maximum(np.ptp(keys, axis=0), np.float32(1e-30))
    codes = np.round((keys - low) / width * np.float32(2**bits - 1)).astype(np.float64)
    lines = []
    for x, y in zip(codes.T, keys.T.astype(np.float64), strict=True):
        columns = np.stack([np.ones_like(x), x], axis=1)
        lines.append(np.linalg.lstsq(columns, y, rcond=None)[0] if np.ptp(x) else np.array([y.mean(), 0.0]))
    return tuple(np.array(lines).T)


def distance(keys: np.ndarray, low: np.ndarray, step: np.ndarray, bits: int) -> np.ndarray:
    """Returns how far each key [p, H] is from the nearest value that a code may stand for."""
    return np.abs(low + np.arange(2**bits)[:, None, None] * step - keys).min(0)


class Tokens(Packed):
    """`singly=true`: fetches only the tokens that weigh most by their codes; the other tokens of ranked pages count by codes."""

    keys_first = False

    def selected(self, worth: np.ndarray, pages: list[np.ndarray]) -> np.ndarray:
        """Returns the indices of the tokens to fetch, of `worth` [S], the summed weights of the tokens of `pages`."""
        layout = self.policy.window_layout
        return np.argsort(-worth, kind="stable")[: self.policy.budget - layout.sinks - layout.slots]

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale, (pages, nodes) = q.shape[-1] ** -0.5, self.walk(q, self.policy.num_ranked(len(self.pages)))
        keys, values = self.coded_pages(pages)
        scores, node_scores = q @ keys.T * scale, np.stack([x for x, *_ in nodes] or [np.full(len(q), -np.inf)], axis=1)
        total = np.logaddexp(np.logaddexp.reduce(scores, axis=1), np.logaddexp.reduce(node_scores, axis=1))
        worth = np.exp(scores - np.where(np.isneginf(total), 0, total)[:, None]).sum(0)
        fetched = self.selected(worth, pages)
        others, exact = np.setdiff1d(np.arange(len(worth)), fetched), np.concatenate([*pages, []]).astype(int)[fetched]
        exact = np.concatenate([resident, exact])
        logits = np.concatenate([q @ self.k[exact].T * scale, scores[:, others], node_scores], axis=1)
        weights = np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None])
        out = weights[:, : -node_scores.shape[1]] @ np.concatenate([self.v[exact], values[others]])
        for weight, (*_, value) in zip(weights[:, -node_scores.shape[1] :].T, nodes, strict=False):
            out += weight[:, None] * value
        return out, np.zeros(len(q))


class Pages(Tokens):
    """`singly=false`: fetches the pages whose tokens weigh most by their codes."""

    def selected(self, worth: np.ndarray, pages: list[np.ndarray]) -> np.ndarray:
        ends = np.cumsum([0, *map(len, pages)])
        by_page = [worth[first:last].sum() for first, last in zip(ends[:-1], ends[1:], strict=True)]
        best = np.argsort(-np.asarray(by_page), kind="stable")[: self.policy.num_fetched(len(self.pages))]
        return np.concatenate([np.zeros(0, int), *(np.arange(ends[i], ends[i + 1]) for i in best)])
