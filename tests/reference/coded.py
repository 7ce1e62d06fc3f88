"""The coded policy in plain numpy, one row and one KV head."""

from __future__ import annotations

import numpy as np

from tests.reference.clustered import Reference


def coded(keys: np.ndarray, bits: int) -> np.ndarray:
    """Returns what the keys [p, H] of a page are by their codes: of each channel the line nearest to keys over codes."""
    keys = keys.astype(np.float32)
    low, wide = keys.min(0), np.maximum(keys.max(0) - keys.min(0), np.float32(1e-30))
    codes = np.round((keys - low) / wide * np.float32(2**bits - 1)).astype(np.float64)
    found = np.empty(keys.shape)
    for channel, (x, y) in enumerate(zip(codes.T, keys.T.astype(np.float64), strict=True)):
        line = np.stack([np.ones_like(x), x], axis=1)
        found[:, channel] = line @ np.linalg.lstsq(line, y, rcond=None)[0]
    return found


Rest = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


class Pages(Reference):
    """Of the pages looked at those are fetched whose tokens weigh most by their codes; tokens of others weigh what these say."""

    keys_first = False

    def looked(self, q: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], Rest]:
        """Returns the pages looked at, what their keys are by codes, what their tokens weigh, and the rest."""
        pages, rest = super().walk(q, self.policy.num_ranked(len(self.pages)))
        keys = [coded(self.k[page], self.policy.codes) for page in pages]
        scores = [q @ x.T * q.shape[-1] ** -0.5 for x in keys]
        both = np.concatenate([np.zeros((len(q), 0)), *scores, *(x[:, None] for x, *_ in rest)], axis=1)
        base = np.logaddexp.reduce(both, axis=1)[:, None] if both.shape[1] else 0
        return pages, keys, [np.exp(x - base).sum(0) for x in scores], rest

    def of_codes(self, q: np.ndarray, page: np.ndarray, keys: np.ndarray, kept: np.ndarray) -> Rest:
        """Returns what the tokens of a page contribute that are not kept."""
        here = ~np.isin(page, kept)
        if not here.any():
            return []
        scores = q @ keys[here].T * q.shape[-1] ** -0.5
        total = np.logaddexp.reduce(scores, axis=1)
        key = np.exp(scores - total[:, None]) @ keys[here] - keys.mean(0)
        return [(total, page, self.v[page].mean(0) + self.told(key))]

    def walk(self, q: np.ndarray, count: int) -> tuple[list[np.ndarray], Rest]:
        pages, keys, worth, rest = self.looked(q)
        best = np.argsort([-x.sum() for x in worth], kind="stable")[:count].tolist()
        for i in set(range(len(pages))) - set(best):
            rest += self.of_codes(q, pages[i], keys[i], np.zeros(0, int))
        return [pages[i] for i in best], rest


class Tokens(Pages):
    """The tokens that weigh most by their codes are fetched, no others."""

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pages, keys, worth, rest = self.looked(q)
        order = np.argsort(-np.concatenate([np.zeros(0), *worth]), kind="stable")
        slots = self.policy.window_layout.sinks + self.policy.window_layout.slots
        kept = np.concatenate([np.zeros(0, int), *pages])[order[: self.policy.budget - slots]]
        for page, known in zip(pages, keys, strict=True):
            rest += self.of_codes(q, page, known, kept)
        exact = np.concatenate([resident, kept])
        logits = np.concatenate([q @ self.k[exact].T * q.shape[-1] ** -0.5, *(x[:, None] for x, *_ in rest)], axis=1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out = weights[:, : len(exact)] @ self.v[exact]
        out += sum(w[:, None] * value for w, (*_, value) in zip(weights[:, len(exact) :].T, rest, strict=True))
        return out / weights.sum(-1, keepdims=True), np.zeros(len(q))
