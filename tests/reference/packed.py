"""The packed policy in plain numpy, one row and one KV head; `rest` is also what its attention to codes is compared with.

The codes themselves come from `icejax.ops.pages.key_codes`, page by page: tests/ops/test_key_codes.py has their reference.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from icejax.ops.pages.key_codes import decode_keys, encode_keys
from tests.reference.clustered import Reference


@functools.partial(jax.jit, static_argnames="bits")
def _coded(x: jax.Array, mask: jax.Array, bits: int) -> tuple[jax.Array, ...]:
    codes = encode_keys(x[None, None, None], mask[None, None, None], bits, "int8")
    return decode_keys(codes, len(x), bits, "float32")[0, 0, 0], codes.step.read()[0, 0, 0], codes.low.scale, codes.step.scale


def coded(x: np.ndarray, page_size: int, bits: int) -> np.ndarray:
    """Returns the vectors [n, H] of a page as their codes stand for them."""
    return coded_with_variance(x, page_size, bits)[0]


def coded_with_variance(x: np.ndarray, page_size: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `coded`, and the variance [H] of what rounding adds to a channel (`icejax.ops.pages.code_error`)."""
    padded = np.zeros((page_size, x.shape[1]), np.float32)
    padded[: len(x)] = x
    vectors, step, *scales = (np.asarray(y, np.float64) for y in _coded(padded, jnp.arange(page_size) < len(x), bits))
    s, t = (y.item() for y in scales)
    return vectors[: len(x)], step**2 / 12 + (2 * s**2 + (2**bits - 1) ** 2 * t**2) / (24 * max(len(x), 1))


def rest(scores: np.ndarray, near: np.ndarray, values: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the `wanted` tokens of largest summed weight, and output [G, H] and log-sum-exp [G] of all others.

    Takes scores [G, S], the log-sum-exp [G] of the tokens that are near, and values [S, H].
    """
    total = np.logaddexp(np.logaddexp.reduce(scores, axis=1), near)
    worth = np.exp(scores - total[:, None]).sum(0)
    best = np.argsort(-worth, kind="stable")[:wanted]
    others = np.setdiff1d(np.arange(scores.shape[1]), best)
    lse = np.logaddexp.reduce(scores[:, others], axis=1)
    return best, np.exp(scores[:, others] - lse[:, None]) @ values[others], lse


class Packed(Reference):
    """State: as in `Reference`; codes of a page are computed once."""

    def coded_pages(self, pages: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the decoded keys and values of pages, one page after the other."""
        decoded = self.__dict__.setdefault("decoded", {})
        for page in pages:
            if page.tobytes() not in decoded:
                sizes = (self.policy.page_size, self.policy.codes)
                decoded[page.tobytes()] = coded(self.k[page], *sizes), coded(self.v[page], *sizes)
        pages = [decoded[page.tobytes()] for page in pages]
        keys, values = (np.concatenate([np.zeros((0, self.k.shape[1])), *(page[i] for page in pages)]) for i in (0, 1))
        return keys, values

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale, layout, tokens = q.shape[-1] ** -0.5, self.policy.window_layout, np.concatenate([[], *self.pages]).astype(int)
        keys, values = self.coded_pages(self.pages)
        near = np.logaddexp.reduce(q @ self.k[resident].T * scale, axis=1)
        room = self.policy.budget - layout.sinks - layout.slots
        room = room if self.policy.exact is None else self.policy.exact
        best, out, lse = rest(q @ keys.T * scale, near, values, room)
        exact = np.concatenate([resident, tokens[best]])
        scores = q @ self.k[exact].T * scale
        total = np.logaddexp(np.logaddexp.reduce(scores, axis=1), lse)
        out = np.exp(scores - total[:, None]) @ self.v[exact] + np.exp(lse - total)[:, None] * out
        return out, np.zeros(len(q))
