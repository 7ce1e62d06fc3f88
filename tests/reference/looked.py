"""The clustered policy that looks in codes, in plain numpy, one row and one KV head."""

from __future__ import annotations

import numpy as np

from tests.reference.clustered import Reference
from tests.reference.packed import coded_with_variance, rest


class Looked(Reference):
    """State: as in `Reference`; codes of a page are computed once.

    Attributes:
        of_codes: the expected error of the codes in the newest `look`, relative to its output, [G].
    """

    of_codes: np.ndarray

    def coded_page(self, page: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the decoded keys and values of a page's tokens, and the variance of a key's and of a value's channels."""
        decoded = self.__dict__.setdefault("decoded", {})
        if page.tobytes() not in decoded:
            sizes = self.policy.page_size, self.policy.look
            (k, of_k), (v, of_v) = (coded_with_variance(x[page], *sizes) for x in (self.k, self.v))
            decoded[page.tobytes()] = k, v, np.tile(of_k, (len(page), 1)), np.tile(of_v, (len(page), 1))
        return decoded[page.tobytes()]

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale, layout = q.shape[-1] ** -0.5, self.policy.window_layout
        walked, others = self.walk(q, min(self.policy.looked, len(self.pages)))
        as_packed = {tuple(sorted(page)): page for page in self.pages}  # the walk sorts the tokens of a page again
        pages = [as_packed[tuple(sorted(page))] for page in walked]
        parts = [self.coded_page(page) for page in pages]
        keys, values, of_keys, of_values = (
            np.concatenate([np.zeros((0, self.k.shape[1])), *(part[i] for part in parts)]) for i in range(4)
        )
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
        norm, others_in_codes = np.linalg.norm(out, axis=-1), np.setdiff1d(np.arange(len(tokens)), best)
        weights = np.exp((q @ keys.T * scale - total[:, None])[:, others_in_codes])
        moved = ((q * scale) ** 2 @ of_keys.T)[:, others_in_codes] * np.square(values[others_in_codes] - out[:, None]).sum(-1)
        self.of_codes = np.sqrt((weights**2 * (moved + of_values[others_in_codes].sum(-1))).sum(-1)) / norm
        uneven = sum(np.exp(2 * (score - total)) * self.share_variance(q, tokens) for score, tokens, _ in others)
        return out, np.sqrt(uneven) / norm * np.ones(len(q))
