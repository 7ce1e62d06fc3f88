"""The coded policy in plain numpy, one row and one KV head: what tests/cache/test_coded.py compares it with."""

from __future__ import annotations

import numpy as np

from tests.reference.clustered import Reference


def coded(keys: np.ndarray, bits: int) -> np.ndarray:
    """Returns the keys [p, H] of a page after coding: in each channel the least-squares line through (code, key).

    The channel 0, 1, 3 in 1 bit has the codes 0, 0, 1 and comes back as 0.5, 0.5, 3.
    """
    keys = keys.astype(np.float32)
    low, width = keys.min(0), np.maximum(keys.max(0) - keys.min(0), np.float32(1e-30))
    codes = np.round((keys - low) / width * np.float32(2**bits - 1)).astype(np.float64)
    decoded = np.empty(keys.shape)
    for channel, (x, y) in enumerate(zip(codes.T, keys.T.astype(np.float64), strict=True)):
        line = np.stack([np.ones_like(x), x], axis=1)
        decoded[:, channel] = line @ np.linalg.lstsq(line, y, rcond=None)[0]
    return decoded


# entries of the tail: log-sum-exp [G], tokens, mean value [G, H]
Rest = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


class Pages(Reference):
    """`singly=false`: fetches the pages whose tokens weigh most by their codes; the other ranked pages count by their codes."""

    keys_first = False

    def ranked_pages(self, q: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], Rest]:
        """Returns the ranked pages, their keys after coding, the weights of their tokens, and the rest."""
        pages, rest = super().walk(q, self.policy.num_ranked(len(self.pages)))
        keys = [coded(self.k[page], self.policy.codes) for page in pages]
        scores = [q @ x.T * q.shape[-1] ** -0.5 for x in keys]
        logits = np.concatenate([np.zeros((len(q), 0)), *scores, *(x[:, None] for x, *_ in rest)], axis=1)
        base = np.logaddexp.reduce(logits, axis=1)[:, None] if logits.shape[1] else 0
        return pages, keys, [np.exp(x - base).sum(0) for x in scores], rest

    def coded_tail(self, q: np.ndarray, page: np.ndarray, keys: np.ndarray, fetched: np.ndarray) -> Rest:
        """Returns the tail entry of the page's tokens that are not fetched; none if all are."""
        unfetched = ~np.isin(page, fetched)
        if not unfetched.any():
            return []
        scores = q @ keys[unfetched].T * q.shape[-1] ** -0.5
        total = np.logaddexp.reduce(scores, axis=1)
        key = np.exp(scores - total[:, None]) @ keys[unfetched] - keys.mean(0)
        return [(total, page, self.v[page].mean(0) + self.told(key))]

    def walk(self, q: np.ndarray, count: int) -> tuple[list[np.ndarray], Rest]:
        pages, keys, weights, rest = self.ranked_pages(q)
        best = np.argsort([-x.sum() for x in weights], kind="stable")[:count].tolist()
        for i in set(range(len(pages))) - set(best):
            rest += self.coded_tail(q, pages[i], keys[i], np.zeros(0, int))
        return [pages[i] for i in best], rest


class Tokens(Pages):
    """`singly=true`: fetches only the tokens that weigh most by their codes."""

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pages, keys, token_weights, rest = self.ranked_pages(q)
        order = np.argsort(-np.concatenate([np.zeros(0), *token_weights]), kind="stable")
        slots = self.policy.window_layout.sinks + self.policy.window_layout.slots
        fetched = np.concatenate([np.zeros(0, int), *pages])[order[: self.policy.budget - slots]]
        for page, page_keys in zip(pages, keys, strict=True):
            rest += self.coded_tail(q, page, page_keys, fetched)
        exact = np.concatenate([resident, fetched])
        logits = np.concatenate([q @ self.k[exact].T * q.shape[-1] ** -0.5, *(x[:, None] for x, *_ in rest)], axis=1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out = weights[:, : len(exact)] @ self.v[exact]
        out += sum(w[:, None] * value for w, (*_, value) in zip(weights[:, len(exact) :].T, rest, strict=True))
        return out / weights.sum(-1, keepdims=True), np.zeros(len(q))
