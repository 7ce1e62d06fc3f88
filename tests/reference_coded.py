"""The coded policy in plain numpy, one row and one KV head."""

from __future__ import annotations

import numpy as np

from tests.reference import Reference


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


class Coded(Reference):
    """Tokens of the pages looked at are ranked by their codes; those not taken weigh what these say."""

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pages, rest = self.walk(q, self.policy.num_looked(len(self.pages)))
        scale = q.shape[-1] ** -0.5
        keys = {tuple(page): coded(self.k[page], self.policy.codes) for page in pages}
        looked = np.concatenate([np.zeros(0, int), *pages])
        s = q @ np.concatenate([np.zeros((0, q.shape[-1])), *(keys[tuple(page)] for page in pages)]).T * scale
        both = np.concatenate([s, *(x[:, None] for x, *_ in rest)], axis=1)
        share = np.exp(s - both.max(-1, keepdims=True)) / np.exp(both - both.max(-1, keepdims=True)).sum(-1, keepdims=True)
        slots = self.policy.window_of.sinks + self.policy.window_of.slots
        kept = looked[np.argsort(-share.sum(0), kind="stable")[: self.policy.budget - slots]]
        for page in pages:
            here = ~np.isin(page, kept)
            if here.any():
                known = keys[tuple(page)]
                scores = q @ known[here].T * scale
                total = np.logaddexp.reduce(scores, axis=1)
                key = np.exp(scores - total[:, None]) @ known[here] - known.mean(0)
                rest.append((total, page, self.v[page].mean(0) + key @ self.fit.matrix))
        exact = np.concatenate([resident, kept])
        logits = np.concatenate([q @ self.k[exact].T * scale, *(x[:, None] for x, *_ in rest)], axis=1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out = weights[:, : len(exact)] @ self.v[exact]
        out += sum(w[:, None] * value for w, (*_, value) in zip(weights[:, len(exact) :].T, rest, strict=True))
        return out / weights.sum(-1, keepdims=True), np.zeros(len(q))
