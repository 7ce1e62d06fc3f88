"""The clustered policy that looks in codes, in plain numpy, one row and one KV head."""

from __future__ import annotations

import numpy as np

from tests.reference.clustered import Reference
from tests.reference.packed import coded, rest


class Looked(Reference):
    """State: as in `Reference`; codes of a page are computed once."""

    def coded_page(self, page: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the decoded keys and values of a page's tokens."""
        decoded = self.__dict__.setdefault("decoded", {})
        if page.tobytes() not in decoded:
            sizes = self.policy.page_size, self.policy.look
            decoded[page.tobytes()] = coded(self.k[page], *sizes), coded(self.v[page], *sizes)
        return decoded[page.tobytes()]

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale, layout = q.shape[-1] ** -0.5, self.policy.window_layout
        walked, others = self.walk(q, min(self.policy.looked, len(self.pages)))
        as_packed = {tuple(sorted(page)): page for page in self.pages}  # the walk sorts the tokens of a page anew
        pages = [as_packed[tuple(sorted(page))] for page in walked]
        parts = [self.coded_page(page) for page in pages]
        keys, values = (np.concatenate([np.zeros((0, self.k.shape[1])), *(part[i] for part in parts)]) for i in (0, 1))
        tokens = np.concatenate([np.zeros(0, int), *pages])
        outside = np.logaddexp.reduce(q @ self.k[resident].T * scale, axis=1)
        for score, *_ in others:
            outside = np.logaddexp(outside, score)
        room = self.policy.budget - layout.sinks - layout.slots
        best, out, lse = rest(q @ keys.T * scale, outside, values, room)
        exact = np.concatenate([resident, tokens[best]])
        scores = q @ self.k[exact].T * scale
        total = np.logaddexp(np.logaddexp.reduce(scores, axis=1), lse)
        for score, *_ in others:
            total = np.logaddexp(total, score)
        out = np.exp(scores - total[:, None]) @ self.v[exact] + np.exp(lse - total)[:, None] * out
        for score, _, value in others:
            out += np.exp(score - total)[:, None] * value
        return out, np.zeros(len(q))
